"""The file that remembers which models were added while a front serves, so that they are there after its next start.

One writer at a time. The file holds what a models file holds in `models`, as JSON, keys and environments included: only
this user may read it. It is replaced as a whole, so that a crash leaves the old one or the new one.
"""

import asyncio
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.models.config import ModelConfig, ModelsConfig
from cluster.preflight.config_file import read_tree, validated
from cluster.preflight.problems import ConfigError, Problem

FIELD = "added_models"
"""Of `cluster.models.config.ModelsConfig`, for messages."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read_added(path: Path) -> dict[str, ModelConfig]:
    """Models by name, in the order in which they came; none if there is no file. Raises `ConfigError`."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError([Problem(FIELD, f"files cannot be written in {path.parent}", "Create it, or choose another")])
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError([Problem(FIELD, f"cannot look at {path}: {error.strerror}", "Check the path")]) from error
    if mode & _WRITABLE_BY_OTHERS:
        what = f"others may write to {path}, and what it says is started"
        raise ConfigError([Problem(FIELD, what, f"Look at what it holds, then chmod 600 {path}")])
    models = validated(ModelsConfig, read_tree(path), f"{path}: ").models
    if files := [name for name, model in models.items() if model.config is not None]:
        what = f"{', '.join(files)}: the cluster is in another file"
        raise ConfigError([Problem(f"{path}", what, "Put what is in it into the field cluster")])
    return models


class AddedModels:
    """What the file holds, or shall hold. Used on one event loop."""

    def __init__(self, path: Path, models: Mapping[str, ModelConfig]) -> None:
        """`models`: as `read_added` found them."""
        self._path = path
        self._models = dict(models)
        self._lock = asyncio.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    async def put(self, name: str, model: ModelConfig) -> None:
        """Remembers a model. Raises `OSError`, and then it is not remembered."""
        async with self._lock:
            await self._replace({**self._models, name: model})

    async def drop(self, name: str) -> None:
        """Forgets a model, if it is known. Raises `OSError`, and then it is still remembered."""
        async with self._lock:
            if name in self._models:
                await self._replace({other: model for other, model in self._models.items() if other != name})

    async def _replace(self, models: dict[str, ModelConfig]) -> None:
        trees = {name: model.model_dump(mode="json", exclude_unset=True) for name, model in models.items()}
        await asyncio.to_thread(_write, self._path, {"models": trees})
        self._models = models


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    """Atomically, and so that it is on the disk afterwards."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(tree, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
