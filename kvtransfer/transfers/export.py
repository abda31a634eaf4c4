"""One transfer as its exporter sees it: what is computed so far, and what an importer is told about it. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.messages import Attach, Check, Done, Fetch, FromExporter, Ready
from kvtransfer.transfers.lease import COMPUTING_STATES, READABLE_STATES, IllegalTransition, Lease


@dataclass(frozen=True)
class ClosedExport:
    """The end of an export: no importer reads its blocks any more."""

    transfer_id: str
    outcome: str
    """`released`, `expired`, `dropped` or `aborted`."""


class Export:
    """The blocks of one prefill, attempt by attempt. Methods return the messages that every attached importer gets."""

    def __init__(self, transfer_id: str, prompt_hash: bytes, num_prompt_tokens: int, lease_until_s: float) -> None:
        self.transfer_id = transfer_id
        self.lease = Lease(transfer_id, lease_until_s)
        self._prompt_hash = prompt_hash
        self._num_prompt_tokens = num_prompt_tokens
        self._attempt = 0
        self._block_ids: list[int] = []  # one per KV block named so far, in token order
        self._block_id_set: set[int] = set()
        self._num_tokens = 0
        self._begun = (0, 0)  # tokens, those above among them, and how many of their first layers are computed
        self._done: Done | None = None

    def announce(self, block_ids: Sequence[int], num_tokens: int, num_layers: int | None = None) -> list[FromExporter]:
        """`num_tokens` of the prompt are computed and lie in `block_ids` (all of them, in token order).

        With `num_layers` only so many of the first layers are, of the tokens that were not announced without. Blocks
        that are not those named before mean that the engine started over without saying so.
        """
        self._require_computing("announce blocks")
        known = len(self._block_ids)
        messages: list[FromExporter] = []
        if list(block_ids[:known]) != self._block_ids or num_tokens < max(self._num_tokens, self._begun[0]):
            messages = self.restart()
            known = 0
        new = list(block_ids[known:])
        is_news = num_tokens > self._num_tokens and (num_layers is None or (num_tokens, num_layers) > self._begun)
        if new or is_news:
            self._block_ids += new
            self._block_id_set.update(new)
            if num_layers is None:
                self._num_tokens, self._begun = num_tokens, (0, 0)
            else:
                self._begun = (num_tokens, num_layers)
            messages.append(Ready(self.transfer_id, self._attempt, known, new, num_tokens, num_layers))
        return messages

    def restart(self) -> list[FromExporter]:
        """The engine gave the blocks up and will compute the prompt again: nothing is ready any more."""
        self._require_computing("restart")
        self._attempt += 1
        self._block_ids = []
        self._block_id_set = set()
        self._num_tokens, self._begun = 0, (0, 0)
        return [Ready(self.transfer_id, self._attempt, 0, [], 0)]

    def finish(
        self, block_ids: Sequence[int], num_tokens: int, first_token: int | None, lease_until_s: float
    ) -> list[FromExporter]:
        """The prompt is computed; the lease alone holds the blocks from now on."""
        messages = self.announce(block_ids, num_tokens)
        self._done = Done(self.transfer_id, self._attempt, num_tokens, self._prompt_hash, first_token)
        self.lease.finish(lease_until_s)
        return [*messages, self._done]

    def mismatch(self, attach: Attach) -> str:
        """Why this importer's prompt is not ours; empty when it is."""
        if attach.num_tokens != self._num_prompt_tokens:
            return f"the importer expects {attach.num_tokens} prompt tokens, the exporter has {self._num_prompt_tokens}"
        if attach.prompt_hash != self._prompt_hash:
            return "the prompts of importer and exporter differ, though their lengths are equal"
        return ""

    def so_far(self) -> list[FromExporter]:
        """What an importer that attaches now has missed."""
        messages: list[FromExporter] = []
        if self._block_ids or self._attempt:
            messages.append(Ready(self.transfer_id, self._attempt, 0, list(self._block_ids), self._num_tokens))
        if self._begun[0]:
            messages.append(Ready(self.transfer_id, self._attempt, len(self._block_ids), [], *self._begun))
        return [*messages, self._done] if self._done else messages

    @property
    def is_done(self) -> bool:
        """The prefill has ended: its blocks will not be written again."""
        return self._done is not None

    def is_over(self, asked: Fetch | Check) -> bool:
        """What is asked for belongs to an earlier attempt, or the export was called off."""
        return asked.attempt < self._attempt or self.lease.state not in READABLE_STATES

    def names_all(self, block_ids: Sequence[int]) -> bool:
        return self._block_id_set.issuperset(block_ids)

    def _require_computing(self, verb: str) -> None:
        if self.lease.state not in COMPUTING_STATES:
            state = self.lease.state.value
            raise IllegalTransition(f"Transfer {self.transfer_id}: the engine cannot {verb} when it is {state}.")
