"""Link `cuda_ipc`: the importer maps the exporter's GPU memory and copies its blocks with one kernel.

The exporter hands out one IPC handle per allocation that holds KV caches, once. The importer opens them when it meets
the exporter and closes them when it is lost. NVLink or PCIe peer access is CUDA's business; both may be one GPU.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from kvtransfer.copy_plan import CopyPlan
from kvtransfer.gpu.copy_kernel import PieceCopier
from kvtransfer.gpu.device import CudaDevice, CudaUnusable
from kvtransfer.gpu.device_thread import DeviceThread
from kvtransfer.layout import Region
from kvtransfer.messages import SharedAllocation

log = logging.getLogger("twinpool.kvtransfer")

COPY_WITHIN_S = 30.0
"""A copy that takes longer has hung the device: the rank gives up, since its blocks can never be freed safely."""

Layers = tuple[tuple[Region, ...], ...]


class DeviceHung(RuntimeError):
    """A kernel does not end: whatever it writes to cannot be used again by this process."""


def share_allocations(device: CudaDevice, regions: Sequence[Region]) -> list[SharedAllocation]:
    """The allocations that hold the regions. Raises CudaUnusable, with the remedy, if one cannot be shared."""
    shared: dict[int, SharedAllocation] = {}
    for region in regions:
        first, end = region.extent
        if any(
            known.base_address <= first and end <= known.base_address + known.num_bytes for known in shared.values()
        ):
            continue
        allocation = device.allocation_at(first)
        if allocation.why_not_shared:
            raise CudaUnusable(allocation.why_not_shared)
        base, num_bytes = allocation.base_address, allocation.num_bytes
        if end > base + num_bytes:
            raise CudaUnusable(
                f"a KV cache of {end - first} bytes at {first:#x} reaches beyond its allocation of {num_bytes} bytes"
            )
        try:
            shared[base] = SharedAllocation(base, num_bytes, device.ipc_handle(base))
        except RuntimeError as error:
            raise CudaUnusable(
                f"CUDA gives no IPC handle of the KV cache: {error}. Containers need --ipc=host; MIG slices have none"
            ) from error
    return list(shared.values())


@dataclass
class _Exporter:
    """What is mapped of one exporter. `translations`: its base address, size, and the address here."""

    translations: list[tuple[int, int, int]]
    num_copying: int = 0
    is_forgotten: bool = False


class CudaIpcReader:
    """The importer's half. Everything is called by the device's thread; `key` names an exporter's process."""

    def __init__(self, device: CudaDevice, thread: DeviceThread, copier: PieceCopier) -> None:
        self._device = device
        self._thread = thread
        self._copier = copier
        self._exporters: dict[Hashable, _Exporter] = {}

    def open(self, key: Hashable, allocations: Sequence[SharedAllocation], layers: Layers) -> Layers:
        """The exporter's layers at their addresses here. Raises CudaUnusable, with nothing left open."""
        opened = _Exporter([])
        try:
            for there in allocations:
                here = self._device.open_ipc(there.handle)
                opened.translations.append((there.base_address, there.num_bytes, here))
            translated = tuple(tuple(_translated(opened, region) for region in layer) for layer in layers)
        except RuntimeError as error:
            self._close(opened)
            raise CudaUnusable(
                f"the exporter's GPU memory cannot be mapped: {error}. Both processes need peer access between their "
                "GPUs; containers need --ipc=host"
            ) from error
        if before := self._exporters.pop(key, None):
            self._retire(before)
        self._exporters[key] = opened
        return translated

    def copy(self, key: Hashable, plan: CopyPlan, then: Callable[[str], None]) -> None:
        """Begin; `then("")` when the targets hold their bytes, or `then(reason)` when that cannot be. Raises DeviceHung
        out of the thread when the kernel never ends.
        """
        exporter = self._exporters.get(key)
        if exporter is None:
            then("the exporter's memory is not mapped any more")
            return
        exporter.num_copying += 1

        def ended(reason: str) -> None:
            if reason:
                raise DeviceHung(f"A copy of {plan.num_bytes} bytes did not end within {COPY_WITHIN_S:g} s: {reason}.")
            exporter.num_copying -= 1
            if exporter.is_forgotten:
                self._retire(exporter)
            then("")

        self._thread.when_done(self._copier.copy(plan), ended, COPY_WITHIN_S)

    def forget(self, key: Hashable) -> None:
        """The exporter is lost: unmap its memory, once no copy reads it."""
        if exporter := self._exporters.pop(key, None):
            self._retire(exporter)

    def close(self) -> None:
        for key in list(self._exporters):
            self.forget(key)

    def _retire(self, exporter: _Exporter) -> None:
        exporter.is_forgotten = True
        if not exporter.num_copying:
            self._close(exporter)

    def _close(self, exporter: _Exporter) -> None:
        for _, _, here in exporter.translations:
            try:
                self._device.close_ipc(here)
            except RuntimeError as error:
                log.warning("ipc_not_closed address=%#x reason=%r", here, str(error))
        exporter.translations.clear()


def _translated(exporter: _Exporter, region: Region) -> Region:
    first, end = region.extent
    for base, num_bytes, here in exporter.translations:
        if base <= first and end <= base + num_bytes:
            return replace(region, base_address=region.base_address + here - base)
    raise CudaUnusable(f"a region at {first:#x} lies in no allocation that the exporter shares")
