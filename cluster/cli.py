"""Entry point of the console script `twinpool`; the commands are in `terminal/commands.py`."""

import signal


def main() -> None:
    """Runs the command line."""
    # Until `serve` has something to clean up, a Ctrl-C just ends the process, without a traceback from an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.terminal.commands import app

    app()


if __name__ == "__main__":
    main()
