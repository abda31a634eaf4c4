"""The file that remembers models which were added while a front served."""

import json
import os
import stat
from pathlib import Path

import pytest

from cluster.models.added_models import AddedModels, read_added
from cluster.models.config import ModelConfig
from cluster.preflight.problems import ConfigError

SECRET = ModelConfig(policy="on_demand", env={"TOKEN": "s3cret"}, cluster={"model": "/m", "engine": "simulated"})


async def test_what_is_put_is_read_back_in_order_and_what_is_dropped_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "added.json"
    added = AddedModels(path, read_added(path))
    await added.put("b", SECRET)
    await added.put("a", ModelConfig())
    await added.put("c", ModelConfig())
    await added.drop("c")
    await added.drop("never there")
    assert list(read_added(path).items()) == [("b", SECRET), ("a", ModelConfig())]
    assert "a" in added
    assert "c" not in added


async def test_only_its_owner_may_read_it_whatever_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "added.json"
    path.write_text('{"models": {}}')
    path.chmod(0o644)
    await AddedModels(path, read_added(path)).put("a", SECRET)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["added.json"]


async def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "added.json"
    added = AddedModels(path, {})
    await added.put("a", SECRET)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        await added.put("b", SECRET)
    assert "b" not in added
    assert list(read_added(path)) == ["a"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["added.json"]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_added(path)
    return str(caught.value)


def test_a_file_that_cannot_be_trusted_or_used_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "added.json"
    assert "cannot be written in" in refusal(tmp_path / "nowhere" / "added.json")
    path.write_text(json.dumps({"models": {"a": {"config": "a.yaml"}}}))
    assert "field cluster" in refusal(path)
    path.write_text('{"models": {"a": {"policy": "sometimes"}}}')
    assert f"{path}: models.a.policy" in refusal(path)
    path.write_text('{"mod')
    assert str(path) in refusal(path)
    path.chmod(0o666)
    assert "others may write to it" in refusal(path).replace(str(path), "it")
