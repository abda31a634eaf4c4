"""Starts a process of simulated workers (`process.py`)."""

import signal

# While imports last, a SIGINT just ends the process; it may be inherited as ignored.
signal.signal(signal.SIGINT, signal.SIG_DFL)

if __name__ == "__main__":
    from cluster.simulated.process import main

    main()
