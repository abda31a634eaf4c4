"""Which worker holds which beginning of which prompt. Pure.

Per block hash one int, whose bits are the workers that hold the block: looking up a prompt is one AND per block,
however many workers there are. It takes about 140 bytes per block and worker, so 4 MB for a worker with 30,000 blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from proxy.scheduling.prompt_hashes import PromptHashes


@dataclass(slots=True)
class _Holdings:
    """What one worker holds."""

    bit: int
    block_size: int
    hashes: set[int] = field(default_factory=set)
    known: bool = False


class PrefixIndex:
    """The prefix caches of all workers. Those of different block sizes are kept apart."""

    def __init__(self) -> None:
        self._workers: dict[str, _Holdings] = {}
        self._names: dict[int, str] = {}
        """By bit."""
        self._holders: dict[int, dict[int, int]] = {}
        """By block size: by block hash, the bits of those who hold it."""

    @property
    def num_blocks(self) -> int:
        """Different blocks, over all workers."""
        return sum(len(holders) for holders in self._holders.values())

    def num_blocks_of(self, worker_id: str) -> int:
        """Blocks that this worker is known to hold."""
        worker = self._workers.get(worker_id)
        return len(worker.hashes) if worker is not None else 0

    # --- what workers tell ------------------------------------------------------------------------

    def known(self, worker_id: str, block_size: int) -> None:
        """Of this worker everything is told; of a new one: it holds nothing yet."""
        self._worker(worker_id, block_size).known = True

    def unknown(self, worker_id: str, block_size: int) -> None:
        """Some of what this worker holds is not told. Missing news is no news of an empty cache."""
        self._worker(worker_id, block_size).known = False

    def stored(self, worker_id: str, hashes: Iterable[int]) -> None:
        """These can be found there now."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        holders, bit = self._holders[worker.block_size], worker.bit
        for block in hashes:
            worker.hashes.add(block)
            others = holders.get(block)
            # `bit` itself, so that all blocks of one worker share that object.
            holders[block] = bit if others is None else others | bit

    def removed(self, worker_id: str, hashes: Iterable[int]) -> None:
        """These cannot."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        for block in hashes:
            if block in worker.hashes:
                worker.hashes.discard(block)
                self._withdraw(worker, block)

    def cleared(self, worker_id: str) -> None:
        """Nothing can be found there."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        for block in worker.hashes:
            self._withdraw(worker, block)
        worker.hashes = set()

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self.cleared(worker_id)
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            del self._names[worker.bit]

    # --- what placement asks ----------------------------------------------------------------------

    def is_known(self, worker_id: str) -> bool:
        """False: the worker may hold more than is listed."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.known

    def cached_tokens(self, prompt: PromptHashes) -> dict[str, int]:
        """By worker: tokens of the longest beginning of the prompt that it holds. Workers with none are left out."""
        tokens: dict[str, int] = {}
        for block_size, holders in self._holders.items():
            num_tokens, holding = 0, -1
            for block in prompt.of_size(block_size) if holders else ():
                still_holding = holding & holders.get(block, 0)
                if still_holding != holding:
                    if num_tokens:
                        self._note(tokens, holding ^ still_holding, num_tokens)
                    holding = still_holding
                    if not holding:
                        break
                num_tokens += block_size
            if num_tokens and holding:
                self._note(tokens, holding, num_tokens)
        return tokens

    def cached_tokens_of(self, worker_id: str, prompt: PromptHashes) -> int:
        """The same for one worker."""
        worker = self._workers.get(worker_id)
        num_tokens = 0
        if worker is not None and worker.hashes:
            for block in prompt.of_size(worker.block_size):
                if block not in worker.hashes:
                    break
                num_tokens += worker.block_size
        return num_tokens

    # --- inside -----------------------------------------------------------------------------------

    def _worker(self, worker_id: str, block_size: int) -> _Holdings:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.block_size != block_size:
            self.forget(worker_id)
            worker = None
        if worker is None:
            bit = 1
            while bit in self._names:
                bit <<= 1
            self._names[bit] = worker_id
            worker = self._workers[worker_id] = _Holdings(bit, block_size)
            self._holders.setdefault(block_size, {})
        return worker

    def _withdraw(self, worker: _Holdings, block: int) -> None:
        holders = self._holders[worker.block_size]
        left = holders[block] & ~worker.bit
        if left:
            holders[block] = left
        else:
            del holders[block]

    def _note(self, tokens: dict[str, int], bits: int, num_tokens: int) -> None:
        while bits:
            bit = bits & -bits
            tokens[self._names[bit]] = num_tokens
            bits ^= bit
