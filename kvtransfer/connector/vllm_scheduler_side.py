"""The connector's half inside vLLM's scheduler: which KV to export, which to import, and when.

Internals of vLLM 0.32 this relies on:
  * `Scheduler` calls the hooks in the order documented in `kv_connector/v1/base.py`; `take_events` is called
    last in `update_from_output`, after freed blocks went back to the pool.
  * `Request.prompt_token_ids`, `_all_token_ids`, `block_hashes`, `update_block_hashes()`, `lora_request`.
  * `KVCacheManager.get_block_ids(request_id)`, `.block_pool.hash_block_size`,
    `.coordinator.single_type_managers[0].req_to_blocks`.
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvtransfer.connector.step_orders import (
    AbortExport,
    AnnounceBlocks,
    ClosedRequest,
    ExportParams,
    FinishExport,
    ImportParams,
    OpenExport,
    OpenImport,
    PlaceImport,
    StepOrders,
    hash_prompt,
)
from kvtransfer.host_messages import PoolStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("twinpool.kvtransfer")

POOL_STATS_INTERVAL_S = 0.25


@dataclass
class _Export:
    params: ExportParams
    request: "Request"
    num_prompt_tokens: int
    opened: bool = False
    num_announced: int = 0


@dataclass
class _Import:
    params: ImportParams
    request: "Request"
    num_tokens: int
    """Tokens whose KV the exporter computes; with a first token, one less than the prompt here."""
    awaited: bool = False
    """Blocks were allocated and the scheduler waits for them."""
    placed: bool = False
    closed: bool = False
    """The import ended, well or not: from here on the request is an ordinary local one."""


class SchedulerSide:
    """Turns what the scheduler does into `StepOrders`, and what the ranks report into request state.

    Lives in the scheduler's thread; owns nothing that blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hash_block_size = block_size
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}
        self._owners: dict[tuple[str, str], str] = {}
        """The request that has a transfer, by mode and transfer id, for as long as ranks may know of it."""
        self._ended: set[str] = set()
        """Requests that ended while ranks still hold their blocks."""
        self._orders = StepOrders()
        self._kv_cache: KVCacheManager | None = None
        self._last_stats: PoolStats | None = None
        self._last_stats_at_s = 0.0
        self._tokens_scheduled = 0
        self.exporter_ranks: list[dict[str, Any]] = []
        """Addresses of this engine's own ranks, for a server without a twinpool proxy in front."""

    def bind(self, kv_cache: "KVCacheManager") -> None:
        self._kv_cache = kv_cache
        self._hash_block_size = kv_cache.block_pool.hash_block_size

    # --- arrival and placement -------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        raw = request.kv_transfer_params
        if not raw:
            return
        try:
            self._open(request, raw)
        except ValueError as error:
            # An exception here would end the engine, and with it everybody else's requests.
            log.warning("transfer_params_ignored request=%s reason=%s", request.request_id, error)

    def _open(self, request: "Request", raw: dict[str, Any]) -> None:
        mode = raw.get("mode")
        if mode == "export":
            params = ExportParams.parse(raw)
            self._own(request, "export", params.transfer_id)
            self._exports[request.request_id] = _Export(params, request, request.num_prompt_tokens)
        elif mode == "import":
            wanted = ImportParams.parse(raw)
            token_ids = request.prompt_token_ids or []
            num_tokens = len(token_ids) - 1 if wanted.first_token else len(token_ids)
            if num_tokens < 1:
                raise ValueError(f"transfer {wanted.transfer_id}: an import needs a prompt of at least one token")
            self._own(request, "import", wanted.transfer_id)
            self._imports[request.request_id] = _Import(wanted, request, num_tokens)
            self._orders.open_imports.append(
                OpenImport(
                    wanted.transfer_id,
                    request.request_id,
                    wanted.rank_addresses,
                    hash_prompt(token_ids[:num_tokens], _adapter(request)),
                    num_tokens,
                    wanted.first_token,
                    wanted.priority,
                )
            )
        else:
            raise ValueError(f"kv_transfer_params.mode must be 'export' or 'import', found {mode!r}")

    def _own(self, request: "Request", mode: str, transfer_id: str) -> None:
        """A plain server's clients choose ids themselves; a second one would take the first one's blocks along."""
        owner = self._owners.setdefault((mode, transfer_id), request.request_id)
        if owner != request.request_id:
            raise ValueError(f"transfer {transfer_id} belongs to another request ({owner}); ids must be unique")

    def _disown(self, request_ids: set[str]) -> None:
        self._owners = {key: owner for key, owner in self._owners.items() if owner not in request_ids}

    def num_tokens_to_load(self, request: "Request", num_cached_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local cache come from the exporter; None while that is not yet known."""
        imported = self._imports.get(request.request_id)
        if imported is None or imported.closed:
            return 0, False
        if imported.placed:
            return None, False
        num_missing = imported.num_tokens - num_cached_tokens
        if imported.params.first_token:
            if num_missing > 0:
                return num_missing, True
            # Every block is cached here, so nothing moves; only the first token is still to come.
            self._place(imported, first_block=0, block_ids=[], awaited=False)
            return None, False
        if num_missing <= 1:
            # vLLM recomputes the last prompt token anyway: one token is all there is to compute.
            self._close_early(imported)
            return 0, False
        return num_missing, True

    def awaits_blocks(self, request_id: str) -> bool:
        """Its prompt comes from an exporter, so until the import ends it needs blocks and no computation."""
        imported = self._imports.get(request_id)
        return imported is not None and not imported.closed

    def blocks_allocated(self, request: "Request", block_ids: list[int], num_external_tokens: int) -> None:
        """The scheduler parked the request on `block_ids`, its whole block table so far, in token order."""
        imported = self._imports.get(request.request_id)
        if imported is None or imported.closed or num_external_tokens == 0:
            return
        first_block = (imported.num_tokens - num_external_tokens) // self._block_size
        end_block = -(-imported.num_tokens // self._block_size)
        self._place(imported, first_block, block_ids[first_block:end_block], awaited=True)

    def _place(self, imported: _Import, first_block: int, block_ids: list[int], awaited: bool) -> None:
        imported.placed, imported.awaited = True, awaited
        self._orders.place_imports.append(PlaceImport(imported.params.transfer_id, first_block, block_ids, awaited))

    def _close_early(self, imported: _Import) -> None:
        imported.closed = True
        self._orders.cancel_imports.append(imported.params.transfer_id)

    # --- one step --------------------------------------------------------------------------------

    def build_orders(self, step: "SchedulerOutput") -> StepOrders:
        orders, self._orders = self._orders, StepOrders()
        orders.no_forward = step.total_num_scheduled_tokens == 0
        self._tokens_scheduled += step.total_num_scheduled_tokens
        if self._exports:
            for new in step.scheduled_new_reqs:
                self._progress(orders, new.req_id, new.num_computed_tokens, step)
            cached = step.scheduled_cached_reqs
            for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids and (export := self._exports.get(request_id)):
                    # It was preempted: its blocks were given away, so what was announced is void.
                    export.num_announced = 0
                    if export.opened:
                        orders.restart_exports.append(export.params.transfer_id)
                self._progress(orders, request_id, num_computed, step)
        return orders

    def _progress(self, orders: StepOrders, request_id: str, num_computed: int, step: "SchedulerOutput") -> None:
        export = self._exports.get(request_id)
        if export is None:
            return
        if not export.opened:
            export.opened = True
            prompt_hash = hash_prompt(export.request.prompt_token_ids or [], _adapter(export.request))
            orders.open_exports.append(
                OpenExport(export.params.transfer_id, request_id, prompt_hash, export.num_prompt_tokens)
            )
        num_ready = min(num_computed + step.num_scheduled_tokens[request_id], export.num_prompt_tokens)
        if num_ready <= export.num_announced:
            return
        export.num_announced = num_ready
        block_ids = self._prompt_blocks(request_id, num_ready)
        is_last = num_ready == export.num_prompt_tokens
        orders.announcements.append(AnnounceBlocks(export.params.transfer_id, block_ids, num_ready, is_last))

    def _prompt_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        assert self._kv_cache is not None
        (block_ids,) = self._kv_cache.get_block_ids(request_id)
        return list(block_ids[: -(-num_tokens // self._block_size)])

    # --- reports of the ranks --------------------------------------------------------------------

    def imports_closed(self, closed: list[ClosedRequest]) -> None:
        """Called before vLLM marks the requests as ready, so the first token is in place when they run."""
        for report in closed:
            imported = self._imports.get(report.request_id)
            if imported is None or imported.closed:
                continue  # it ended here meanwhile, or another rank reported first
            imported.closed = True
            if imported.params.first_token:
                if report.first_token is None:
                    raise RuntimeError(f"transfer {imported.params.transfer_id} closed without its first token")
                self._set_first_token(imported.request, report.first_token)

    def _set_first_token(self, request: "Request", token: int) -> None:
        assert request.prompt_token_ids is not None
        request.prompt_token_ids[-1] = token
        request._all_token_ids[-1] = token
        # The placeholder may have completed a block, whose hash is then of the wrong tokens.
        del request.block_hashes[(request.num_tokens - 1) // self._hash_block_size :]
        request.update_block_hashes()

    def blocks_released(self, request_ids: set[str]) -> None:
        if over := self._ended & request_ids:
            self._ended -= over
            self._disown(over)

    # --- the end of a request --------------------------------------------------------------------

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Whether the ranks still need the request's blocks, and what the reply tells a plain client."""
        request_id = request.request_id
        if (imported := self._imports.pop(request_id, None)) and not imported.closed:
            self._orders.cancel_imports.append(imported.params.transfer_id)
            if imported.awaited:
                self._ended.add(request_id)  # vLLM itself keeps these blocks until the import is reported
        export = self._exports.pop(request_id, None)
        if export is None or not export.opened:
            if request_id not in self._ended and (imported or export):
                self._disown({request_id})
            return False, None
        self._ended.add(request_id)
        transfer_id = export.params.transfer_id
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED or not request.output_token_ids:
            self._orders.abort_exports.append(AbortExport(transfer_id, f"prefill ended as {request.status.name}"))
            return True, None
        block_ids = self._prompt_blocks(request_id, export.num_prompt_tokens)
        self._orders.finish_exports.append(
            FinishExport(transfer_id, block_ids, export.num_prompt_tokens, request.output_token_ids[0])
        )
        return True, {
            "mode": "import",
            "transfer_id": transfer_id,
            "first_token": False,
            "exporter": {"ranks": self.exporter_ranks},
        }

    # --- accounting ------------------------------------------------------------------------------

    def pool_stats(self) -> PoolStats | None:
        """Blocks by state, when they changed; counted from the block tables, not derived from each other.

        Called when a step has ended, so what was scheduled before the last one is computed.
        """
        assert self._kv_cache is not None
        tables = self._kv_cache.coordinator.single_type_managers[0].req_to_blocks
        now_s = time.monotonic()
        if tables and now_s - self._last_stats_at_s < POOL_STATS_INTERVAL_S:
            return None  # more steps will follow, and this walks every table
        pool = self._kv_cache.block_pool
        used = {b.block_id for rid, blocks in tables.items() if rid not in self._ended for b in blocks if not b.is_null}
        held = {b.block_id for rid, blocks in tables.items() if rid in self._ended for b in blocks if not b.is_null}
        stats = PoolStats(
            total=pool.num_gpu_blocks - 1,  # block 0 is vLLM's null block
            free=pool.get_num_free_blocks(),
            used=len(used),
            leased=len(held - used),
            tokens_computed=self._tokens_scheduled,
        )
        self._last_stats_at_s = now_s
        if stats == self._last_stats:
            return None
        self._last_stats = stats
        return stats


def _adapter(request: "Request") -> str:
    """Name, path and number of the LoRA adapter; empty for the model alone."""
    lora = request.lora_request
    return f"{lora.lora_int_id} {lora.lora_name} {lora.lora_path}" if lora is not None else ""
