"""A paged engine with continuous batching, chunked prefill and prefix caching, in which nothing is computed. Pure.

`plan` decides one step and how long it takes, `finish` says what came of it; between the two the caller lets the time
pass. What concerns transfers is put into `events`.
"""

import math
from dataclasses import dataclass

from cluster.config import SimulationConfig
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.simulated.engine.answers import finish_of, output_of
from cluster.simulated.engine.blocks import BlockPool, block_hashes
from cluster.simulated.engine.cost import Chunk, CostModel
from cluster.simulated.engine.events import (
    EngineEvent,
    ExportAborted,
    ExportFinished,
    ExportProgressed,
    ExportStarted,
    ImportCancelled,
    ImportOpened,
    ImportPlaced,
)
from cluster.simulated.engine.sequence import ExportOrder, ImportOrder, Place, Sequence, sequence_of
from cluster.simulated.engine.vllm_frames import Finish, Output, PrefixCacheStats, Request, SchedulerStats
from cluster.simulated.engine.vocabulary import Vocabulary, state_after, state_of


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, under way."""

    work: tuple[tuple[Sequence, int], ...]
    """Sequences, and how many of their tokens it computes."""
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockCount:
    """`free + used + leased == total`, each counted for itself."""

    total: int
    free: int
    used: int
    leased: int


class SimulatedEngine:
    """One worker's engine. Not thread-safe; every time is passed in."""

    def __init__(self, config: SimulationConfig, max_model_len: int, cost: CostModel, vocabulary: Vocabulary) -> None:
        self.events: list[EngineEvent] = []
        self._config = config
        self._max_model_len = max_model_len
        self._cost = cost
        self._vocabulary = vocabulary
        self.cached = CachedBlocks(config.block_size, config.num_blocks)
        """What a prompt may find."""
        self._pool = BlockPool(config.num_blocks, self.cached)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._importing: dict[str, Sequence] = {}  # by transfer id
        self._leased: dict[str, list[int]] = {}  # blocks of prompts that wait to be fetched, by transfer id
        self.adapters: dict[int, str] = {}
        """Names by number; nothing is computed with them, but their blocks are others."""
        self.tokens_computed = 0
        """Of prompts and outputs, also twice: while it grows the engine gets on."""
        self._num_arrived = 0
        self._prefix_stats = PrefixCacheStats()

    # --- requests --------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """Queues a request; raises `ValueError` for one that it cannot run."""
        if request.request_id in self._sequences:
            raise ValueError(f"a request with the id {request.request_id} is running already")
        self._num_arrived += 1
        sequence = sequence_of(request, self._num_arrived, now_s)
        if math.ceil(len(sequence.tokens) / self._config.block_size) > self._config.num_blocks:
            raise ValueError(f"{len(sequence.tokens)} tokens do not fit into {self._config.num_blocks} KV blocks")
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)
        if isinstance(sequence.transfer, ImportOrder):
            prompt = sequence.tokens[: sequence.num_to_import]
            self.events.append(ImportOpened(sequence.transfer, len(prompt), state_of(prompt)))

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds; an unknown id means that it has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.is_import and isinstance(sequence.transfer, ImportOrder):
            self._importing.pop(sequence.transfer.transfer_id, None)
            self.events.append(ImportCancelled(sequence.transfer.transfer_id))
        self._end(sequence, None)

    @property
    def request_ids(self) -> list[str]:
        return list(self._sequences)

    # --- transfers -------------------------------------------------------------------------------

    def close_import(self, transfer_id: str, num_valid_tokens: int, first_token: int | None) -> None:
        """The first tokens of the prompt are in its blocks, the rest has to be computed."""
        sequence = self._importing.pop(transfer_id, None)
        if sequence is None:
            return
        if first_token is not None and sequence.num_to_import < sequence.num_prompt_tokens:
            sequence.tokens[-1] = first_token
            del sequence.hashes[(len(sequence.tokens) - 1) // self._config.block_size :]
        sequence.num_computed = max(0, min(num_valid_tokens, len(sequence.tokens) - 1))
        sequence.num_imported = max(0, sequence.num_computed - sequence.num_cached)
        sequence.import_over = True
        sequence.place = Place.WAITING
        self._waiting.append(sequence)

    def end_lease(self, transfer_id: str) -> None:
        """Nobody fetches these blocks any more."""
        self._pool.give_back(self._leased.pop(transfer_id, []))

    # --- steps -----------------------------------------------------------------------------------

    def plan(self, now_s: float) -> Step | None:
        """The next step, None if there is nothing to compute. Reserves blocks for imports on the way."""
        work: dict[Sequence, int] = {}
        budget = self._config.max_num_batched_tokens
        has_room = True
        for sequence in sorted([*self._running, *self._waiting], key=_turn):
            if sequence.place is Place.RUNNING and budget > 0:
                num_tokens = min(sequence.num_left, budget)
                num_waiting = len(self._waiting)
                if self._reserve(sequence, sequence.num_computed + num_tokens, work):
                    work[sequence] = num_tokens
                    budget -= num_tokens
                has_room = has_room and len(self._waiting) == num_waiting
            elif sequence.place is Place.WAITING and (has_room or sequence.table):
                # Nobody overtakes one that finds too few blocks, but those that have theirs run, or they keep them.
                fits = not sequence.is_import or self._place_import(sequence)
                if fits and not sequence.is_import and budget > 0:
                    num_tokens = self._admit(sequence, budget, now_s)
                    fits = num_tokens > 0
                    if fits:
                        work[sequence] = num_tokens
                        budget -= num_tokens
                has_room = has_room and fits
        if not work:
            return None
        return Step(tuple(work.items()), self._seconds(work))

    def _seconds(self, work: dict[Sequence, int]) -> float:
        decoding = [sequence for sequence in work if sequence.num_output and sequence.num_left == 1]
        kv_tokens = sum(len(sequence.tokens) for sequence in decoding)
        chunks = [Chunk(n, s.num_computed) for s, n in work.items() if not s.num_output or s.num_left > 1]
        return self._cost.step_s(chunks, len(decoding), kv_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int, work: dict[Sequence, int]) -> bool:
        """Blocks for so many tokens, taken from those that run with less urgency if there are no free ones."""
        while True:
            num_new = math.ceil(num_tokens / self._config.block_size) - len(sequence.table)
            if num_new <= 0:
                return True
            blocks = self._pool.hold((), num_new)
            if blocks is not None:
                sequence.table += blocks
                return True
            victim = max(self._running, key=lambda s: s.urgency)
            self._preempt(victim)
            work.pop(victim, None)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.give_back(sequence.table)
        sequence.table, sequence.num_computed, sequence.num_named = [], 0, 0
        sequence.place = Place.WAITING
        sequence.num_preempted += 1
        self._waiting.append(sequence)
        if sequence.export_open and isinstance(sequence.transfer, ExportOrder):
            self.events.append(ExportProgressed(sequence.transfer.transfer_id, 0))

    def _admit(self, sequence: Sequence, budget: int, now_s: float) -> int:
        """How many tokens of a waiting sequence the step computes; 0 when there is no room for it."""
        if len(self._running) >= self._config.max_num_seqs:
            return 0
        block_size = self._config.block_size
        if sequence.table:
            cached: list[int] = []
            num_computed = sequence.num_computed
        else:
            cached = self._known_blocks(sequence, len(sequence.tokens) - 1)
            num_computed = len(cached) * block_size
        num_tokens = min(len(sequence.tokens) - num_computed, budget)
        num_new = math.ceil((num_computed + num_tokens) / block_size) - len(cached) - len(sequence.table)
        blocks = self._pool.hold(cached, max(0, num_new))
        if blocks is None:
            return 0
        if not sequence.table:
            sequence.num_named = len(cached)
            self._note_hits(sequence, num_computed)
        sequence.table += blocks
        sequence.num_computed = num_computed
        sequence.place = Place.RUNNING
        sequence.scheduled_s = sequence.scheduled_s or now_s
        self._waiting.remove(sequence)
        self._running.append(sequence)
        if isinstance(sequence.transfer, ExportOrder):
            self._open_export(sequence, sequence.transfer.transfer_id)
        return num_tokens

    def _open_export(self, sequence: Sequence, transfer_id: str) -> None:
        if not sequence.export_open:
            sequence.export_open = True
            prompt_state = state_of(sequence.tokens[: sequence.num_prompt_tokens])
            self.events.append(ExportStarted(transfer_id, sequence.num_prompt_tokens, prompt_state))
        self.events.append(ExportProgressed(transfer_id, sequence.num_computed))

    def _known_blocks(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Blocks of its first tokens, at most `num_tokens`, that the prefix cache has."""
        sequence.hashes = block_hashes(sequence.tokens, self._config.block_size, sequence.root, sequence.hashes)
        if not self._config.prefix_caching or sequence.wants_whole_prompt:
            return []
        return self._pool.cached(sequence.hashes[: max(0, num_tokens) // self._config.block_size])

    def _note_hits(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.num_preempted == 0:
            sequence.num_cached = num_cached
            self._prefix_stats.requests += 1
            self._prefix_stats.queries += len(sequence.tokens)
            self._prefix_stats.hits += num_cached

    def _place_import(self, sequence: Sequence) -> bool:
        """Reserves blocks for the whole prompt; False when there are too few."""
        assert isinstance(sequence.transfer, ImportOrder)
        transfer_id = sequence.transfer.transfer_id
        has_placeholder = sequence.num_to_import < sequence.num_prompt_tokens
        cached = self._known_blocks(sequence, len(sequence.tokens) - 1)
        num_cached = len(cached) * self._config.block_size
        if not has_placeholder and sequence.num_to_import - num_cached <= 1:
            # The last prompt token is computed here anyway: nothing is left to fetch.
            sequence.import_over = True
            self.events.append(ImportCancelled(transfer_id))
            return True
        num_blocks = math.ceil(len(sequence.tokens) / self._config.block_size)
        table = self._pool.hold(cached, num_blocks - len(cached))
        if table is None:
            return False
        sequence.table, sequence.num_named = table, len(cached)
        sequence.place = Place.IMPORTING
        self._note_hits(sequence, num_cached)
        self._waiting.remove(sequence)
        self._importing[transfer_id] = sequence
        self.events.append(ImportPlaced(transfer_id, num_cached))
        return True

    def finish(self, step: Step, now_s: float) -> list[Output]:
        """What came of a step: one output per sequence that got a token. Those aborted meanwhile get none."""
        outputs = []
        for sequence, num_tokens in step.work:
            self.tokens_computed += num_tokens
            if sequence.place is not Place.RUNNING:
                continue
            sequence.num_computed += num_tokens
            self._name_full_blocks(sequence)
            if sequence.export_open and isinstance(sequence.transfer, ExportOrder):
                self.events.append(ExportProgressed(sequence.transfer.transfer_id, sequence.num_computed))
            if sequence.num_left == 0:
                outputs.append(self._sample(sequence, now_s))
        return outputs

    def _name_full_blocks(self, sequence: Sequence) -> None:
        block_size = self._config.block_size
        num_full = sequence.num_computed // block_size
        if num_full > sequence.num_named and self._config.prefix_caching:
            if len(sequence.hashes) < num_full:
                sequence.hashes = block_hashes(sequence.tokens, block_size, sequence.root, sequence.hashes)
            for index in range(sequence.num_named, num_full):
                self._pool.name(sequence.table[index], sequence.hashes[index])
            sequence.num_named = num_full

    def _sample(self, sequence: Sequence, now_s: float) -> Output:
        if sequence.state is None:
            sequence.state = state_of(sequence.tokens)
        may_end = sequence.num_output >= sequence.sampling.min_tokens
        token = self._vocabulary.next_token(sequence.state, sequence.sampling.eos_token_id if may_end else None)
        sequence.state = state_after(sequence.state, token)
        sequence.tokens.append(token)
        sequence.num_output += 1
        finish = finish_of(sequence, token, self._max_model_len)
        output = output_of(sequence, token, finish, now_s, self._vocabulary.words)
        if finish is not None:
            self._end(sequence, finish)
        return output

    def _end(self, sequence: Sequence, finish: Finish | None) -> None:
        """Removes a sequence. A finished prefill leaves a lease; `finish` None: it was aborted."""
        del self._sequences[sequence.request_id]
        if sequence.place is Place.RUNNING:
            self._running.remove(sequence)
        elif sequence.place is Place.WAITING:
            self._waiting.remove(sequence)
        sequence.place = Place.ENDED
        table, sequence.table = sequence.table, []
        if sequence.export_open and isinstance(sequence.transfer, ExportOrder):
            transfer_id = sequence.transfer.transfer_id
            if finish is Finish.LENGTH:
                num_held = math.ceil(sequence.num_prompt_tokens / self._config.block_size)
                self._leased[transfer_id] = table[:num_held]
                table = table[num_held:]
                self.events.append(ExportFinished(transfer_id, sequence.tokens[sequence.num_prompt_tokens]))
            else:
                reason = "aborted" if finish is None else finish.name.lower()
                self.events.append(ExportAborted(transfer_id, f"the prefill ended as {reason}"))
        self._pool.give_back(table)

    # --- state -----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forgets all blocks; False, and nothing forgotten, while some are held."""
        return self._pool.forget_all()

    def block_count(self) -> BlockCount:
        """Blocks by who holds them."""
        used = {block for sequence in self._sequences.values() for block in sequence.table}
        leased = {block for table in self._leased.values() for block in table}
        return BlockCount(self._pool.num_blocks, self._pool.num_free, len(used), len(leased - used))

    def take_stats(self) -> SchedulerStats:
        """For vLLM's metrics; what is counted since the last call starts again."""
        prefix_stats, self._prefix_stats = self._prefix_stats, PrefixCacheStats()
        usage = 1 - self._pool.num_free / self._pool.num_blocks
        return SchedulerStats(len(self._running), len(self._waiting) + len(self._importing), usage, prefix_stats)


def _turn(sequence: Sequence) -> tuple[bool, tuple[float, int]]:
    """Who comes first in a step: those that generate, then prompts by their urgency."""
    generates = sequence.place is Place.RUNNING and sequence.num_left == 1
    return not generates, sequence.urgency
