"""Lets the processes of a worker on CPUs step back behind those that pass tokens on.

Its ranks compute without a pause, on cores that they share with the proxy, the hosts and the client. Linux 6.18 lets
them keep a core for 30 to 80 ms while a thread that woke up there waits, although it needs a fraction of a millisecond:
tokens that had been computed in time then reached the client late, two at once.
"""

import logging
import os
from pathlib import Path

log = logging.getLogger("twinpool.host")

_AUTOGROUP = Path("/proc/self/autogroup")


def step_back(niceness: int, autogroup: Path = _AUTOGROUP) -> None:
    """The calling thread and whatever it starts have this niceness from now on, up to 19; 0 changes nothing.

    Where Linux schedules whole sessions against each other (autogroups), that of a process counts only within its
    session, so the session, which is the worker's alone, gets it as well.
    """
    if niceness <= 0:
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    try:
        autogroup.write_text(str(niceness))
    except OSError as error:  # no such kernel, or not allowed here
        log.info("autogroup_not_set niceness=%d error=%s", niceness, error)
