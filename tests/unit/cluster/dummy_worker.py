"""A process that stands for a worker host: it starts a child and a grandchild, as an engine would.

Usage: dummy_worker.py PIDS_FILE [obedient|stubborn|crash|leaves]. The file gets the three pids.
"""

import os
import signal
import subprocess
import sys
import traceback
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

CHILD = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "1":
    grandchild = subprocess.Popen([sys.executable, "-c", sys.argv[3], "0", *sys.argv[2:]])
    print(os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
"""


def main() -> None:
    pids, behaviour = Path(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = [sys.executable, "-c", CHILD, "1", behaviour, CHILD]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    family = child.stdout.readline().strip()
    shared = SharedMemory(create=True, size=64)
    pids.with_suffix(".shm").write_text(shared.name)
    complete = pids.with_suffix(".new")
    complete.write_text(f"{os.getpid()} {family}")
    complete.rename(pids)
    sys.stdout.write("the dummy is up\n")
    sys.stdout.flush()
    if behaviour == "crash":
        raise ValueError("the dummy had enough")
    if behaviour == "leaves":
        os._exit(0)
    child.wait()


if __name__ == "__main__":
    try:
        main()
    except ValueError:
        traceback.print_exc()
        os._exit(3)  # the children stay behind, as they do after a crash
