"""How many connections each API server process has, in memory that all of them share.

vLLM's `NoSignalServer` reads it: a new connection is left to whoever has fewest, for a few milliseconds. One number of
8 bytes per process, each written by its process; the dispatcher's process writes it when that one is gone.
"""

import mmap
from pathlib import Path

NOT_ACCEPTING = 1 << 30
"""More than anybody has."""
_BYTES = 8


def create_loads(path: Path, num_processes: int) -> None:
    """Makes the file; nobody accepts yet."""
    path.write_bytes(NOT_ACCEPTING.to_bytes(_BYTES, "little") * num_processes)


def open_loads(path: Path) -> memoryview:
    """The numbers, one per process; writing to them tells the others."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
