"""What a started process writes to its log."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_log() -> None:
    """From now on ours from INFO up goes to standard error, and what libraries say by their own levels.

    The level is that of our loggers, because something that vLLM imports raises the root's.
    """
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    logging.getLogger("twinpool").setLevel(logging.INFO)
