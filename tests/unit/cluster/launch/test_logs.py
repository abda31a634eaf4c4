import logging

from cluster.launch.logs import start_log


def test_our_lines_are_written_whatever_level_a_library_gives_the_root_logger() -> None:
    root, ours = logging.getLogger(), logging.getLogger("twinpool")
    levels = root.level, ours.level
    try:
        start_log()
        root.setLevel(logging.WARNING)
        assert logging.getLogger("twinpool.worker").isEnabledFor(logging.INFO)
        assert not logging.getLogger("somebody.else").isEnabledFor(logging.INFO)
    finally:
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
