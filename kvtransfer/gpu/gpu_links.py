"""A rank's links over its GPU, as its endpoint uses them: one device, one thread, jobs in and results out."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.compute_fence import CudaFence
from kvtransfer.copy_plan import plan_copy
from kvtransfer.endpoint.copy_threads import CopyJob, CopyResult
from kvtransfer.endpoint.peers import PeerKey
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.gpu.copy_kernel import PieceCopier
from kvtransfer.gpu.device import CudaDevice, CudaUnusable, open_device
from kvtransfer.gpu.device_thread import DeviceThread
from kvtransfer.gpu.staged_memory import StagedMemory
from kvtransfer.layout import CacheMap
from kvtransfer.links.cuda_ipc import CudaIpcReader, Layers, share_allocations
from kvtransfer.links.nccl import NcclLink, nccl_version
from kvtransfer.links.nccl_orders import NcclEvent, NcclOrder
from kvtransfer.messages import SharedAllocation

log = logging.getLogger("twinpool.kvtransfer")


@dataclass(frozen=True)
class Mapping:
    """An exporter's memory is mapped, or cannot be."""

    key: PeerKey
    layers: Layers
    reason: str
    """Empty when it is."""


class GpuLinks:
    """Has the interface of `CopyThreads` (`submit`, `results`, `error`, `close`) and what the GPU links need besides.

    `on_result` is called, by the device's thread, whenever `results`, `mappings` or `nccl_events` has got something.
    """

    def __init__(
        self, device: CudaDevice, cache: CacheMap, settings: EndpointSettings, on_result: Callable[[], None]
    ) -> None:
        """Raises CudaUnusable when the device lacks what every link needs."""
        device.use()
        self.device_name = device.name
        self.unusable: dict[str, str] = {}
        self.allocations: list[SharedAllocation] = []
        """Under the caches, for `cuda_ipc`."""
        self.nccl_version = 0
        self.memory = StagedMemory(device, settings.chunk_bytes)
        self.results: deque[CopyResult] = deque()
        self.mappings: deque[Mapping] = deque()
        self._device = device
        self._cache = cache
        self._chunk_bytes = settings.chunk_bytes
        self._on_result = on_result
        self._look_around(settings)
        self._copier = PieceCopier(device)
        self._thread = DeviceThread(f"kv-gpu-{settings.rank}", device, on_result)
        self._ipc = CudaIpcReader(device, self._thread, self._copier)
        self._nccl = None
        if self.nccl_version:
            self._nccl = NcclLink(
                device,
                self._thread,
                self._copier,
                settings.staging_bytes(cache.layout),
                settings.prepare_within_s,
                settings.stalled_after_s / 2,  # what waits behind it can be asked for again before it stalls
                on_result,
            )

    @property
    def error(self) -> BaseException | None:
        return self._thread.error

    @property
    def nccl_events(self) -> deque[NcclEvent]:
        return self._nccl.events if self._nccl else deque()

    def open_memory(self) -> StagedMemory:
        """For another thread, which will be its only user. Raises CudaUnusable."""
        self._device.use()
        return StagedMemory(self._device, self._chunk_bytes)

    def compute_fence(self, compute_stream: Callable[[], int]) -> CudaFence:
        return CudaFence(self._device, self._thread, compute_stream)

    def submit(self, job: CopyJob) -> None:
        """A copy from memory that was mapped before."""
        self._thread.post(lambda: self._copy(job))

    def map_memory(self, key: PeerKey, allocations: list[SharedAllocation], layers: Layers) -> None:
        """`layers`: at the exporter's addresses. What comes of it is in `mappings`."""
        self._thread.post(lambda: self._map(key, allocations, layers))

    def forget(self, key: PeerKey) -> None:
        """An exporter is lost."""
        self._thread.post(lambda: self._ipc.forget(key))

    def execute(self, order: NcclOrder) -> None:
        if self._nccl is None:
            raise RuntimeError(f"an order for NCCL, which this rank has not: {order}")
        self._nccl.execute(order)

    def close(self, timeout_s: float) -> bool:
        """False when the device's thread takes longer than that."""
        if self._nccl:
            self._nccl.close()
        self._thread.post(self._ipc.close)
        has_ended = self._thread.close(timeout_s)
        if has_ended and self._thread.error is None:
            self.memory.close()
        return has_ended

    def _look_around(self, settings: EndpointSettings) -> None:
        if "cuda_ipc" in settings.links:
            try:
                self.allocations = share_allocations(self._device, [r for layer in self._cache.layers for r in layer])
            except CudaUnusable as error:
                self.unusable["cuda_ipc"] = str(error)
        if "nccl" in settings.links:
            try:
                self.nccl_version = nccl_version(self._device)
            except CudaUnusable as error:
                self.unusable["nccl"] = str(error)
        for link, reason in self.unusable.items():
            log.warning("link_unusable link=%s reason=%r", link, reason)

    def _copy(self, job: CopyJob) -> None:
        piece = job.piece
        started_s = time.monotonic()

        def ended(reason: str) -> None:
            ended_s = time.monotonic()
            kind = "peer_lost" if reason else ""
            self.results.append(CopyResult(job, ended_s - started_s, ended_s, kind, reason))
            self._on_result()

        self._ipc.copy(job.key, plan_copy(piece.source_ids, piece.target_ids, job.sources, job.targets), ended)

    def _map(self, key: PeerKey, allocations: list[SharedAllocation], layers: Layers) -> None:
        try:
            mapping = Mapping(key, self._ipc.open(key, allocations, layers), "")
        except CudaUnusable as error:
            mapping = Mapping(key, (), str(error))
        self.mappings.append(mapping)
        self._on_result()


def open_gpu_links(cache: CacheMap, settings: EndpointSettings, on_result: Callable[[], None]) -> GpuLinks | None:
    """None for a cache in CPU memory. Raises CudaUnusable for one on a GPU that cannot be used at all."""
    if cache.device == "cpu":
        return None
    return GpuLinks(open_device(cache.device), cache, settings, on_result)
