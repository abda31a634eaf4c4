"""What the simulator says of a run, beside what was measured."""

import msgspec


class Prediction(msgspec.Struct):
    """A run as measured and as simulated, in this order; None: no request came so far."""

    arm: str
    rate: float
    seed: int
    kind: str
    """Of requests; `all`: all of them."""
    fitted_on: bool
    """The simulator's costs come from this very run."""
    ttft_p50_s: tuple[float | None, float | None]
    itl_p50_s: tuple[float | None, float | None]
    attained: tuple[float | None, float | None]
    """Shares of requests within both limits."""


def cells(each: Prediction) -> tuple[str, str, str]:
    """`measured / simulated (error)` of TTFT, ITL and the share within both limits."""
    return (
        _pair(each.ttft_p50_s, 1, 3),
        _pair(each.itl_p50_s, 1000, 1),
        _share(each.attained),
    )


def _pair(values: tuple[float | None, float | None], factor: float, digits: int) -> str:
    measured, simulated = values
    if measured is None or simulated is None:
        return "-"
    error = f" ({100 * (simulated / measured - 1):+.0f} %)" if measured else ""
    return f"{measured * factor:.{digits}f} / {simulated * factor:.{digits}f}{error}"


def _share(values: tuple[float | None, float | None]) -> str:
    measured, simulated = values
    if measured is None or simulated is None:
        return "-"
    return f"{100 * measured:.0f} / {100 * simulated:.0f} % ({100 * (simulated - measured):+.0f})"
