"""The JSON documents (0600, in the runtime directory) by which processes are told what they are."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from cluster.configuration.node import WITH_KEYS

Settings = TypeVar("Settings", bound=BaseModel)


def write_document(settings: BaseModel, path: Path) -> Path:
    """Writes `settings`, keys included, to `path`, which is returned. Nobody else may read it."""
    write_private(path, settings.model_dump_json(indent=2, context=WITH_KEYS))
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user may read."""
    path.touch(mode=0o600)
    path.write_text(text)


def read_document(kind: type[Settings], path: Path, what: str, advice: str, failure: type[Exception]) -> Settings:
    """Reads a document back; raises `failure` with a sentence for the operator.

    `what` names the document in it, `advice` says where such documents come from.
    """
    try:
        return kind.model_validate_json(path.read_text())
    except OSError as error:
        raise failure(f"cannot read the {what} {path}: {error.strerror}") from error
    except ValidationError as error:
        # Without the values: this is logged, and keys are among them. For that reason no `from` either.
        reasons = [f"{'.'.join(map(str, each['loc'])) or 'the document'}: {each['msg']}" for each in error.errors()]
    raise failure(
        f"the {what} {path} do not fit this version of twinpool; {advice} `twinpool serve` of the same installation. "
        + "; ".join(reasons)
    )
