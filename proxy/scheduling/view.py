"""What a placement is decided from: the facts about each worker, what it reports, and the shape of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proxy.scheduling.prompt_hashes import NO_HASHES, PromptHashes
from proxy.scheduling.slo import DEFAULT_STANDING, Standing

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One life of one worker: what does not change while it lives."""

    worker_id: str
    role: Role
    epoch: str
    """Of its process; another one under the same id is another worker."""
    index: int
    """Breaks ties."""
    fingerprint: str
    """Of its KV layout; workers with equal ones can exchange blocks."""
    max_model_len: int
    """Tokens of prompt and output together that this engine accepts."""
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    max_num_seqs: int
    """Requests that the engine runs at once."""
    max_num_batched_tokens: int
    """Tokens that the engine computes in one step: the chunk budget."""


@dataclass(frozen=True, slots=True)
class AdapterView:
    """LoRA adapters by number, and who has loaded which."""

    known: frozenset[int] = frozenset()
    """Those that some request may still want."""
    held: frozenset[tuple[str, int]] = frozenset()
    """Worker and adapter. A worker without the adapter of a request is never given it."""

    def allows(self, worker_id: str, adapter: int) -> bool:
        """Whether a request with this adapter may go there."""
        return not adapter or (worker_id, adapter) in self.held


NO_ADAPTERS = AdapterView()


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
    continues: bool = False
    """It goes on with a stream whose worker was lost; its prompt ends in tokens that the client has."""
    accepted: bool = False
    """The client has got another choice of the same answer, or a part of it."""
    avoid: str = ""
    """The worker under which it was just lost: only if no other takes it now."""
    adapter: int = 0
    """Of the LoRA adapter that it wants; 0: the base model."""
    prompt_hashes: PromptHashes = field(default=NO_HASHES, compare=False, repr=False)
    """What to ask `PrefixIndex` for."""

    @property
    def promised(self) -> bool:
        """Its client has got something already, so it is not turned away."""
        return self.continues or self.accepted


class CachedPrefixes(Protocol):
    """Who has which prompts in its KV cache (`prefix_index.PrefixIndex`)."""

    def cached_tokens(self, prompt: PromptHashes) -> Mapping[str, int]:
        """Tokens of the longest beginning that each worker has for certain; workers with none are left out."""


class NothingKnown:
    """Where workers do not tell what they have cached."""

    def cached_tokens(self, prompt: PromptHashes) -> Mapping[str, int]:
        return {}
