"""Whether a file can be written, asked before minutes have been spent on what goes into it."""

from pathlib import Path


def why_unwritable(option: str, file: Path | None) -> str:
    """A sentence that begins with the option; empty when all is well or no file was named. What is there stays."""
    if file is None:
        return ""
    parent = file.absolute().parent
    if not parent.is_dir():
        return f"{option} {file}: the directory {parent} does not exist; make it, or name another file"
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        return f"{option} {file} cannot be written: {error.strerror}; name another file"
    return ""
