"""Starts a further API server process (`process.py`)."""

import signal

# While imports last, which takes seconds, a SIGINT just ends the process; it may be inherited as ignored.
signal.signal(signal.SIGINT, signal.SIG_DFL)

if __name__ == "__main__":
    from proxy.api_servers.process import main

    main()
