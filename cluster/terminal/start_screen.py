"""Shows the stages of a start on standard error: live on a terminal, one line per event elsewhere."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_TAIL_BYTES = 2048
_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] )?")


@dataclass
class _Stage:
    title: str
    detail: str = ""
    began_s: float = field(default_factory=time.monotonic)
    took_s: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class _WorkerLine:
    log_path: Path
    began_s: float


class StartScreen:
    """The stages so far and, while workers start, the newest line of each one's log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stages: list[_Stage] = []
        self._workers: dict[str, _WorkerLine] = {}
        self._began_s = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.clear()
        if self._live.is_started:
            self._live.stop()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """One stage, from its begin to its end."""
        stage = _Stage(title)
        self._stages.append(stage)
        self._line(title)
        try:
            yield
        except BaseException:
            stage.failed = True
            raise
        finally:
            stage.took_s = time.monotonic() - stage.began_s
        self._line(f"{title}: done in {stage.took_s:.1f} s")

    def detail(self, text: str) -> None:
        """What the current stage is doing."""
        self._stages[-1].detail = text
        self._line(f"{self._stages[-1].title}: {text}")

    def worker_started(self, worker_id: str, log_path: Path) -> None:
        """A worker process exists."""
        self._workers[worker_id] = _WorkerLine(log_path, time.monotonic())
        self._line(f"{worker_id}: process started, log {log_path}")

    def worker_ready(self, worker_id: str) -> None:
        """A worker has joined."""
        if (worker := self._workers.pop(worker_id, None)) is not None:
            self._line(f"{worker_id}: ready after {time.monotonic() - worker.began_s:.1f} s")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"[{time.monotonic() - self._began_s:5.1f} s] {text}", markup=False, highlight=False)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for stage in self._stages:
            seconds = f"{(stage.took_s or time.monotonic() - stage.began_s):5.1f} s"
            mark: RenderableType = Spinner("dots", style="cyan")
            if stage.took_s is not None:
                mark = Text("✗", style="red") if stage.failed else Text("✓", style="green")
            table.add_row(mark, Text(stage.title), Text(seconds, style="dim"), Text(stage.detail, style="dim"))
        workers = Table.grid(padding=(0, 1))
        for worker_id, worker in self._workers.items():
            seconds = f"{time.monotonic() - worker.began_s:5.1f} s"
            newest = Text(newest_line(worker.log_path), style="dim", no_wrap=True, overflow="ellipsis")
            workers.add_row("   ", Text(worker_id), Text(seconds, style="dim"), newest)
        return Group(table, workers)


def newest_line(log_path: Path) -> str:
    """The text of the last line of a log that is not empty, without vLLM's process, level, time and place."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    newest = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return _PREFIX.sub("", newest)
