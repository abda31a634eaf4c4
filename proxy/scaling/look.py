"""What the controller sees at one moment, and what it decides. Times in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.scheduling.view import Role


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of one class since the last look."""

    ttft_s: float
    """Target of the class."""
    itl_s: float
    gives_way: bool
    """Who cannot be in time goes behind the others, or is refused."""
    count: int
    prefill_s: tuple[float, ...]
    """How long a prefill worker computes the prompt of each, or of a sample that stands for all `count`.

    Empty as long as that is not known.
    """


@dataclass(frozen=True, slots=True)
class Measured:
    """What clients got since the last look, queue time included."""

    first_tokens: int = 0
    """Answers that began, without those of `hopeless`."""
    late: int = 0
    """Of them later than their class wants, and those that were turned away."""
    hopeless: int = 0
    """Answers that came late and whose prompt alone takes longer than the target."""
    streams: int = 0
    """Answers that ended."""
    uneven: int = 0
    """Of them with more long gaps than their class allows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A decode worker."""

    requests: int
    """That it generates for, or that are on their way to it and have room there."""
    running: int
    """Those that it generates for."""
    step_s: float
    """Of a decode step, as learned of late; 0 if it has not been watched."""
    blocks_taken: int
    blocks_total: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Workers of one pool."""

    serving: int
    coming: int = 0
    """They are being started, or change their role."""

    @property
    def count(self) -> int:
        return self.serving + self.coming


@dataclass(frozen=True, slots=True)
class Look:
    """Everything since the last look."""

    seconds: float
    """Since then."""
    pools: Mapping[Role, PoolSize]
    arrivals: tuple[Arrivals, ...] = ()
    prefill_share: float = 1.0
    """Of the prompts' computation that is left for prefill workers: the rest is cached, or short and done elsewhere."""
    queued_prefill_s: float = 0.0
    """Of one prefill worker, for the prompts that wait in the proxy."""
    waiting_for_decode: int = 0
    """Requests that only wait for room at a decode worker."""
    batches: tuple[Batch, ...] = ()
    measured: Measured = Measured()


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers each pool shall have."""

    want: Mapping[Role, int]
    convert: int = 0
    """Prefill workers that become decode workers on the way there; negative: the other way round."""
    reasons: tuple[str, ...] = ()
    """Why something changes; empty if nothing does."""
    warnings: tuple[str, ...] = field(default=())
    """What more workers cannot help, and what they could help if there were any."""
