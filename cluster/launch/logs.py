"""What a started process writes to its log, and what is said of tasks that fail."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("twinpool.launcher")

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_log() -> None:
    """From now on ours from INFO up goes to standard error, and what libraries say by their own levels.

    The level is that of our loggers, because something that vLLM imports raises the root's.
    """
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    logging.getLogger("twinpool").setLevel(logging.INFO)


def failure_logger(to: logging.Logger, event: str) -> Callable[["asyncio.Task[Any]"], None]:
    """What to call when a task is done that nobody waits for: it writes down why it failed, if it did."""

    def log_failure(task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            to.error("%s task=%s error=%s", event, task.get_name(), error, exc_info=error)

    return log_failure


log_failure = failure_logger(log, "launcher_task_failed")
"""Of tasks of the launcher."""
