import io
from pathlib import Path

import pytest
from rich.console import Console

from cluster.terminal.start_screen import StartScreen, newest_line


def screen(terminal: bool) -> tuple[StartScreen, io.StringIO]:
    text = io.StringIO()
    return StartScreen(Console(file=text, force_terminal=terminal, width=120)), text


def test_outside_a_terminal_every_event_is_a_line(tmp_path: Path) -> None:
    shown, text = screen(terminal=False)
    with shown:
        with shown.stage("model"):
            shown.detail("converting")
        shown.worker_started("prefill-0", tmp_path / "log")
        shown.worker_ready("prefill-0")
    lines = text.getvalue().splitlines()
    assert [line.partition("] ")[2].split(" in ")[0].split(" after ")[0] for line in lines] == [
        "model",
        "model: converting",
        "model: done",
        f"prefill-0: process started, log {tmp_path}/log",
        "prefill-0: ready",
    ]


def test_on_a_terminal_a_failed_stage_is_marked() -> None:
    shown, text = screen(terminal=True)
    with pytest.raises(ValueError, match="no"), shown, shown.stage("workers"):
        raise ValueError("no")
    assert "✗" in text.getvalue()
    assert "workers" in text.getvalue()


def test_the_newest_line_of_a_log_is_the_last_that_is_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert newest_line(log) == ""
    log.write_text("x" * 5000 + "\nloading weights\n\n")
    assert newest_line(log) == "loading weights"
    log.write_text("(Worker pid=15637) INFO 11-30 08:20:15 [cpu_model_runner.py:68] Starting to load\n")
    assert newest_line(log) == "Starting to load"
