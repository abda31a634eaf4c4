"""What a placement is decided from: the workers as the proxy sees them, and the shape of one request."""

from dataclasses import dataclass, field
from typing import Literal

from proxy.scheduling.prompt_hashes import NO_HASHES, PromptHashes
from proxy.scheduling.slo import DEFAULT_STANDING, Standing

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment."""

    worker_id: str
    role: Role
    alive: bool
    """It takes new requests."""
    fingerprint: str
    """Of its KV layout; workers with equal ones can exchange blocks."""
    max_model_len: int
    """Tokens of prompt and output together that this engine accepts."""
    queued_tokens: int
    """Prompt tokens sent to it whose prefill has not ended yet."""
    num_requests: int
    """Requests it carries, and those on their way to it."""
    blocks_free: int
    """KV blocks free for new requests: the last report less what was promised since and what is on its way."""
    in_transition: bool = False
    """Not alive for new requests: it drains, or is being started again. Waiting for it, or its successor, may pay."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """All workers, in a stable order; ties are broken by it."""

    workers: tuple[WorkerView, ...]
    compatible: frozenset[tuple[str, str]] = frozenset()
    """Fingerprints of prefill and decode workers that differ and can exchange blocks all the same."""

    def alive(self, role: Role) -> tuple[WorkerView, ...]:
        """The workers of a role that take requests."""
        return tuple(w for w in self.workers if w.role == role and w.alive)

    def can_pair(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Blocks of the one can be copied to the other."""
        layouts = (prefill.fingerprint, decode.fingerprint)
        return layouts[0] == layouts[1] or layouts in self.compatible


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What placement needs to know about a request, and nothing else."""

    num_prompt_tokens: int
    max_tokens: int
    """Completion tokens at most; 1 for requests that only want the prompt scored."""
    first_token_mode: bool
    """Token 1 may come from the prefill worker; else the decode worker samples it (exact mode)."""
    wants_prompt_scores: bool = False
    """Prompt logprobs: only a worker that computes the whole prompt can give them."""
    local_because: str = ""
    """Not empty: this request cannot be handed over (pooling, images, embeddings, streamed input), and why."""
    standing: Standing = DEFAULT_STANDING
    prompt_hashes: PromptHashes = field(default=NO_HASHES, compare=False, repr=False)
    """What to ask `PrefixIndex` for."""
    continues: bool = False
    """It goes on with a stream whose worker was lost; its prompt ends in tokens that the client has."""
    avoid: str = ""
    """The worker under which it was just lost: only if there is no other."""
