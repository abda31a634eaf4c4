"""The connector's half inside each rank: carries out `StepOrders` on the rank's endpoint.

Internals of vLLM 0.32 this relies on: `finished_sending` may name a request only after its
`request_finished` returned True, `finished_recving` only one that the scheduler parked on blocks; either
exactly once (vLLM asserts both). `save_kv_layer` is called within the forward pass, in the engine's thread, after the
attention of a layer, when the step's keys and values of that layer are written: eagerly, compiled, and between
piecewise CUDA graphs, but not where attention itself is replayed in a CUDA graph. Where it is not called, blocks are
announced after the forward pass. With micro-batches it is called before the layer is complete.
"""

import logging
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.compute_fence import ComputeFence, FencedCalls, NoFence
from kvtransfer.connector.step_orders import AnnounceBlocks, ClosedRequest, StepOrders
from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.transfers.layer_groups import LayerGroups

log = logging.getLogger("twinpool.kvtransfer")

NO_FORWARD_WAIT_S = 0.005
"""How long a step without computation may wait for a transfer: it replaces vLLM's 1 kHz polling."""


@dataclass
class StepResults:
    """What one step has to report."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    bad_block_ids: set[int] = field(default_factory=set)
    closed: list[ClosedRequest] = field(default_factory=list)


class RankSide:
    """Lives in the rank's engine thread; the endpoint's threads do all waiting and copying.

    `fence` tells when the engine's computation is in memory. Blocks are announced, and places for imports given, only
    behind it: the forward pass of this step may still be writing the ones, those before it using the others. `groups`
    tells when some layers of a prompt's last chunk are to be announced before the others are computed.
    """

    def __init__(
        self, endpoint: RankEndpoint, fence: ComputeFence | None = None, groups: LayerGroups | None = None
    ) -> None:
        self._endpoint = endpoint
        self._fenced = FencedCalls(fence or NoFence())
        self._groups = groups or LayerGroups()
        self._last_chunks: list[AnnounceBlocks] = []
        """Prompts that end with the forward pass of this step."""
        self._export_requests: dict[str, str] = {}  # transfer id -> request id
        self._import_requests: dict[str, str] = {}
        self._ended_exports: set[str] = set()
        """Exports whose request ended: only now may the scheduler hear that they closed."""
        self._closed_exports: set[str] = set()
        self._awaited_imports: set[str] = set()
        self._has_orders_to_wait_for = False

    @property
    def is_idle(self) -> bool:
        return not (self._export_requests or self._import_requests)

    def before_forward(self, orders: StepOrders) -> None:
        endpoint = self._endpoint
        endpoint.check()
        for opened in orders.open_exports:
            self._export_requests[opened.transfer_id] = opened.request_id
            endpoint.open_export(opened.transfer_id, opened.prompt_hash, opened.num_prompt_tokens)
        # What is fenced and not yet made is superseded by these: a finish names all blocks, and the token that comes
        # with it was computed from them.
        for transfer_id in orders.restart_exports:
            self._fenced.drop(transfer_id)
            endpoint.restart_export(transfer_id)
        for finished in orders.finish_exports:
            self._ended_exports.add(finished.transfer_id)
            self._fenced.drop(finished.transfer_id)
            endpoint.finish_export(finished.transfer_id, finished.block_ids, finished.num_tokens, finished.first_token)
        for aborted in orders.abort_exports:
            self._ended_exports.add(aborted.transfer_id)
            self._fenced.drop(aborted.transfer_id)
            endpoint.abort_export(aborted.transfer_id, aborted.reason)
        for wanted in orders.open_imports:
            self._import_requests[wanted.transfer_id] = wanted.request_id
            endpoint.open_sharded_import(
                wanted.transfer_id,
                wanted.rank_addresses,
                wanted.prompt_hash,
                wanted.num_tokens,
                wanted.wants_first_token,
                wanted.priority,
            )
        for placed in orders.place_imports:
            if placed.awaited:
                self._awaited_imports.add(placed.transfer_id)
            place = partial(endpoint.place_import, placed.transfer_id, placed.first_block, placed.block_ids)
            self._fenced.call(placed.transfer_id, place)
        for transfer_id in orders.cancel_imports:
            self._fenced.drop(transfer_id)
            endpoint.cancel_import(transfer_id)
        if self._groups.are_wanted:
            self._last_chunks = [ready for ready in orders.announcements if ready.is_last]
            self._groups.restart()

    def layer_computed(self, layer_name: str) -> None:
        """Within the forward pass: the step's keys and values of this layer are written, or will be by the stream."""
        if not self._last_chunks or not (num_layers := self._groups.computed(layer_name)):
            return
        for ready in self._last_chunks:
            announce = partial(self._endpoint.announce, ready.transfer_id, ready.block_ids, ready.num_tokens)
            self._fenced.call(ready.transfer_id, partial(announce, num_layers))

    def after_forward(self, orders: StepOrders) -> None:
        self._last_chunks = []
        for ready in orders.announcements:
            announce = partial(self._endpoint.announce, ready.transfer_id, ready.block_ids, ready.num_tokens)
            self._fenced.call(ready.transfer_id, announce)

    def take_results(self, orders: StepOrders) -> StepResults:
        if orders.no_forward and not self.is_idle:
            self._endpoint.wait(NO_FORWARD_WAIT_S)
        results = StepResults()
        for export in self._endpoint.take_closed_exports():
            log.debug("export_closed transfer=%s outcome=%s", export.transfer_id, export.outcome)
            self._closed_exports.add(export.transfer_id)
        for transfer_id in self._closed_exports & self._ended_exports:
            self._closed_exports.discard(transfer_id)
            self._ended_exports.discard(transfer_id)
            results.sent.add(self._export_requests.pop(transfer_id))
        for imported in self._endpoint.take_closed_imports():
            request_id = self._import_requests.pop(imported.transfer_id)
            if imported.failure_kind:
                log.warning(
                    "import_failed transfer=%s outcome=%s kind=%s reason=%s",
                    imported.transfer_id, imported.outcome, imported.failure_kind, imported.reason,
                )  # fmt: skip
            if imported.transfer_id in self._awaited_imports:
                self._awaited_imports.discard(imported.transfer_id)
                results.received.add(request_id)
                results.bad_block_ids.update(imported.bad_block_ids)
            if imported.outcome != "cancelled":
                results.closed.append(ClosedRequest(request_id, imported.first_token, imported.outcome == "loaded"))
        return results

    def close(self) -> None:
        self._endpoint.close()
