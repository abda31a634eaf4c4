"""What a started process writes to its log, and what the launcher says of tasks that fail."""

import asyncio
import logging

log = logging.getLogger("twinpool.launcher")

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_log() -> None:
    """From now on ours from INFO up goes to standard error, and what libraries say by their own levels.

    The level is that of our loggers, because something that vLLM imports raises the root's.
    """
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    logging.getLogger("twinpool").setLevel(logging.INFO)


def log_failure(task: "asyncio.Task[None]") -> None:
    """To be called when a task of the launcher is done: nobody waits for it who would notice."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("launcher_task_failed task=%s", task.get_name(), exc_info=error)
