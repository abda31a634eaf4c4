"""What is remembered of a cluster in the background: a file per port, in a directory that only this user can enter."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from pydantic import SecretStr

from cluster.config import ClusterConfig
from cluster.settings_document import write_private


class BackgroundError(Exception):
    """A cluster in the background cannot be started, found or stopped; a sentence for the operator."""


class Record(msgspec.Struct, frozen=True):
    """One cluster."""

    pid: int
    began: str
    """When that process began, as the kernel counts, so that another process with its number is not taken for it."""
    url: str
    """Empty until it serves."""
    config_hash: str
    log: str
    stop_timeout_s: float
    drain_timeout_s: float
    start_timeout_s: float


def state_dir() -> Path:
    """Made if it is not there; raises `BackgroundError` if somebody else could write to it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "twinpool" if base else Path(tempfile.gettempdir()) / f"twinpool-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        facts = directory.stat(follow_symlinks=False)
    except OSError as error:
        raise BackgroundError(
            f"cannot make the directory {directory}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours"
        ) from error
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or directory.is_symlink():
        raise BackgroundError(
            f"{directory} belongs to somebody else, or others may enter it; remove it, or set XDG_RUNTIME_DIR to a "
            "directory of yours"
        )
    return directory


def config_hash(config: ClusterConfig) -> str:
    """Equal for configurations that mean the same, keys included."""
    tree = config.model_dump(mode="python")
    text = json.dumps(tree, default=_plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


@contextmanager
def locked(port: int) -> Iterator[None]:
    """One `up` or `down` at a time for a port; raises `BackgroundError` when another one is at work."""
    with (state_dir() / f"{port}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BackgroundError(
                f"another `twinpool up` or `twinpool down` is at work on port {port}; wait until it has ended"
            ) from error
        yield


def record_path(port: int) -> Path:
    return state_dir() / f"{port}.json"


def log_path(port: int) -> Path:
    """Where the cluster's output goes."""
    return state_dir() / f"{port}.log"


def write_record(port: int, record: Record) -> None:
    """Replaces what was remembered, all at once."""
    new = record_path(port).with_suffix(".new")
    write_private(new, msgspec.json.encode(record).decode())
    new.replace(record_path(port))


def living_record(port: int) -> Record | None:
    """What is remembered of the cluster on a port, if its process lives; forgets one that does not."""
    try:
        record = msgspec.json.decode(record_path(port).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    if lives(record):
        return record
    forget(port)
    return None


def forget(port: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        record_path(port).unlink()


def living_ports() -> list[int]:
    """On which clusters are up."""
    ports = sorted(int(path.stem) for path in state_dir().glob("*.json") if path.stem.isdigit())
    return [port for port in ports if living_record(port) is not None]


def lives(record: Record) -> bool:
    """Its process, and not another one with the same number, has not ended."""
    return record.began != "" and began(record.pid) == record.began


def ask_to_end(record: Record) -> None:
    """SIGTERM to its process, and to no other one that has got its number meanwhile; nothing if it has ended."""
    try:
        process = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if lives(record):
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def began(pid: int) -> str:
    """When a process began; empty if it has ended."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
