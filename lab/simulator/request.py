"""One request on its way through a simulated cluster."""

from dataclasses import dataclass, field

from lab.load.client import Record
from proxy.scheduling.view import RequestShape


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the cluster, and what its client sees."""

    request_id: str
    work: str
    shape: RequestShape
    output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int
    arrived_s: float
    sent_tokens: int = 0
    """Tokens that the client has."""
    last_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""
    status: int = 200
    prefill: str = ""
    decode: str = ""
    places: int = 0
    """How often it was placed; events of an earlier place mean nothing."""

    @property
    def context_tokens(self) -> int:
        """Its prompt and what it has of its answer."""
        return self.shape.num_prompt_tokens + self.sent_tokens

    @property
    def finished(self) -> bool:
        return bool(self.error) or self.sent_tokens >= self.output_tokens

    def token(self, now_s: float) -> None:
        """The client gets one."""
        if self.ttft_s is None:
            self.ttft_s = now_s - self.arrived_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.sent_tokens += 1


def record_of(request: Request, beside_s: float = 0.0) -> Record:
    """What its client saw, who waits `beside_s` for the first token beside queue and engine."""
    return Record(
        work=request.work,
        session=int(request.request_id.rpartition("-")[2]),
        turn=0,
        prompt_tokens=request.shape.num_prompt_tokens,
        output_tokens=request.output_tokens,
        planned_s=request.arrived_s,
        sent_s=request.arrived_s,
        ttft_s=None if request.ttft_s is None else request.ttft_s + beside_s,
        gaps_s=request.gaps_s,
        end_to_end_s=request.last_s - request.arrived_s + beside_s,
        tokens=request.sent_tokens,
        status=request.status,
        error=request.error,
    )
