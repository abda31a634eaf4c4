"""The prefill worker: computes prompts chunk by chunk and hands their KV over.

Run by the launcher as `python -m prefill.worker SETTINGS.json`.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    # While imports last, which takes seconds, a SIGINT just ends the process; it may be inherited as ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.host.worker_host import run_worker
    from cluster.worker_settings import WorkerSettingsError, read_worker_settings

    if len(sys.argv) != 2:
        sys.exit("usage: python -m prefill.worker SETTINGS.json (written by `twinpool serve`)")
    try:
        settings = read_worker_settings(Path(sys.argv[1]))
    except WorkerSettingsError as error:
        sys.exit(str(error))
    run_worker(settings)


if __name__ == "__main__":
    main()
