"""Links of `kvtransfer`, through the same `RankEndpoint` that the engines use.

Imports are attached before the clock starts, as they are while a prompt is still being computed. The time runs from
giving the blocks their places until the last import closes: asking, copying and being told.
"""

import time
from collections.abc import Sequence

from kvtransfer.rank_endpoint import EndpointSettings, RankEndpoint
from lab.links.arms.kinds import ArmFailed, ArmUnusable, ExporterSide, ImporterSide, Offers, Site
from lab.links.messages import Queued, Transfer

_PROMPT_HASH = b"lab"
_MEET_TIMEOUT_S = 30.0
"""NCCL takes several seconds to connect two ranks."""
_ATTACH_S = 0.02
"""For imports to attach and to be told of the blocks; what that has not done by then counts."""


def _endpoint(link: str, site: Site, role: str) -> RankEndpoint:
    # Between machines only TCP is left; on one machine workers talk over ipc sockets.
    bind = "tcp://127.0.0.1:0" if link in ("zmq", "nccl") else f"ipc://{site.directory}/{role}-{link}"
    settings = EndpointSettings(rank=0, bind=bind, worker_id=f"lab-{role}", links=(link,))
    return RankEndpoint(settings, site.cache.as_registered())


class LinkExporter(ExporterSide):
    def __init__(self, site: Site, link: str) -> None:
        self._block_size = site.cache.shape.block_size
        self._endpoint = _endpoint(link, site, "exporter")
        self._open: set[str] = set()
        self.offers = {"address": self._endpoint.address, "epoch": self._endpoint.epoch}

    def offer(self, transfers: Sequence[Transfer]) -> None:
        self._forget_closed()
        for transfer in transfers:
            num_tokens = len(transfer.source_ids) * self._block_size
            self._endpoint.open_export(transfer.name, _PROMPT_HASH, num_tokens)
            self._endpoint.finish_export(transfer.name, transfer.source_ids, num_tokens, None)
            self._open.add(transfer.name)

    def withdraw(self) -> None:
        self._forget_closed()
        for name in self._open:
            self._endpoint.abort_export(name, "it is not wanted any more")

    def close(self) -> None:
        self._endpoint.close()

    def _forget_closed(self) -> None:
        self._open -= {closed.transfer_id for closed in self._endpoint.take_closed_exports()}


class LinkImporter(ImporterSide):
    def __init__(self, site: Site, offers: Offers, link: str) -> None:
        """Meets the exporter. Raises ArmUnusable with what the two said when no link came of it."""
        self._block_size = site.cache.shape.block_size
        self._link = link
        self._exporter = (offers["address"], offers["epoch"])
        self._endpoint = _endpoint(link, site, "importer")
        self._endpoint.meet(*self._exporter)
        until_s = time.monotonic() + _MEET_TIMEOUT_S
        while not (peers := self._endpoint.stats().peers) and time.monotonic() < until_s:
            time.sleep(0.01)
        said = peers.get(self._exporter[0], f"no answer within {_MEET_TIMEOUT_S:g} s")
        if not said.startswith(f"{link}: "):
            self._endpoint.close()
            raise ArmUnusable(said)

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        until_s = time.monotonic() + timeout_s
        for transfer in transfers:
            self._attach(transfer)
        time.sleep(_ATTACH_S)
        started_s = time.perf_counter()
        for transfer in transfers:
            self._endpoint.place_import(transfer.name, 0, transfer.target_ids)
        self._end({transfer.name for transfer in transfers}, until_s)
        return time.perf_counter() - started_s

    def queue(self, large: Transfer | None, small: Sequence[Transfer], pause_s: float, timeout_s: float) -> Queued:
        until_s = time.monotonic() + timeout_s
        open_: set[str] = set()
        small_s: list[float] = []
        ended_s = started_s = time.perf_counter()
        if large:
            self._begin(large)
            open_.add(large.name)
        for transfer in small:
            if large and large.name not in open_:
                break
            issued_s = time.perf_counter()
            self._begin(transfer)
            open_.add(transfer.name)
            while transfer.name in open_:
                self._take_closed(open_, until_s)
                if large and large.name in open_:
                    ended_s = time.perf_counter()
            small_s.append(time.perf_counter() - issued_s)
            time.sleep(pause_s)
        if open_:
            self._end(open_, until_s)
            ended_s = time.perf_counter()
        return Queued(ended_s - started_s, small_s)

    def close(self) -> None:
        self._endpoint.close()

    def _begin(self, transfer: Transfer) -> None:
        self._attach(transfer)
        self._endpoint.place_import(transfer.name, 0, transfer.target_ids)

    def _attach(self, transfer: Transfer) -> None:
        num_tokens = len(transfer.source_ids) * self._block_size
        self._endpoint.open_import(transfer.name, *self._exporter, _PROMPT_HASH, num_tokens, False)

    def _end(self, names: set[str], until_s: float) -> None:
        while names:
            self._take_closed(names, until_s)

    def _take_closed(self, names: set[str], until_s: float) -> None:
        """Drops from `names` what has closed, at least one. Raises ArmFailed."""
        if not self._endpoint.wait(max(0.0, until_s - time.monotonic())):
            raise ArmFailed(f"{len(names)} transfers did not close in time")
        for closed in self._endpoint.take_closed_imports():
            if closed.outcome != "loaded" or closed.link != self._link:
                raise ArmFailed(f"a transfer over {closed.link!r} ended as {closed.outcome}: {closed.reason}")
            names.discard(closed.transfer_id)
