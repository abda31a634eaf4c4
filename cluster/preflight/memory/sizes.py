"""Sizes in words."""


def mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def kib(num_bytes: float) -> str:
    return f"{num_bytes / 1024:g} KiB"


def gb(num_bytes: float) -> str:
    """In units of 1e9, as makers of GPUs and of models count."""
    return f"{num_bytes / 1e9:,.1f} GB"
