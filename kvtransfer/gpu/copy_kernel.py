"""Lists of byte ranges copied by one kernel: a gather, a scatter, or both, between any memory the device can address.

The list of a `CopyPlan` goes to the device in one upload. The kernel cuts the ranges into tiles, one thread block per
tile at a time, and moves 16 bytes per load wherever source and target are aligned alike.
"""

import time
from dataclasses import dataclass

import numpy as np

from kvtransfer.copy_plan import CopyPlan
from kvtransfer.gpu.device import CudaDevice, CudaUnusable, Event, PinnedBuffer, Stream

TILE_BYTES = 16 << 10
NUM_THREADS = 256
MAX_THREAD_BLOCKS = 64
"""Enough to saturate NVLink; the rest of the device stays with the engine."""
LIST_PIECES = 16 << 10
"""Ranges per launch; a longer plan takes several."""
LIST_BYTES = LIST_PIECES * 4 * 8
"""Per slot, once pinned on the host and once on the device."""
NUM_SLOTS = 4
_SLOT_WAIT_S = 10.0

KERNEL_NAME = "copy_pieces"
KERNEL = r"""
#define TILE_BYTES 16384ull
#define UNROLLED 4

template <typename Word>
__device__ void copy_words(const char* source, char* target, unsigned long long num_bytes)
{
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(target);
    const unsigned int num_words = (unsigned int)(num_bytes / sizeof(Word));
    const unsigned int step = blockDim.x;
    unsigned int word = threadIdx.x;
    for (; word + (UNROLLED - 1) * step < num_words; word += UNROLLED * step) {
        Word held[UNROLLED];  // all loads are under way before the first store waits for one
        #pragma unroll
        for (int i = 0; i < UNROLLED; ++i) held[i] = from[word + i * step];
        #pragma unroll
        for (int i = 0; i < UNROLLED; ++i) to[word + i * step] = held[i];
    }
    for (; word < num_words; word += step) to[word] = from[word];
    for (unsigned long long byte = num_words * sizeof(Word) + threadIdx.x; byte < num_bytes; byte += step)
        target[byte] = source[byte];
}

// The list is [4, num_pieces]: source, target, length, and the number of the piece's first tile.
extern "C" __global__ void copy_pieces(unsigned long long list, unsigned int num_pieces, unsigned int num_tiles)
{
    const unsigned long long* sources = reinterpret_cast<const unsigned long long*>(list);
    const unsigned long long* targets = sources + num_pieces;
    const unsigned long long* lengths = targets + num_pieces;
    const unsigned long long* first_tiles = lengths + num_pieces;
    for (unsigned int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        unsigned int piece = 0, end = num_pieces;
        while (end - piece > 1) {
            const unsigned int middle = piece + (end - piece) / 2;
            if (first_tiles[middle] <= tile) piece = middle; else end = middle;
        }
        const unsigned long long offset = (tile - first_tiles[piece]) * TILE_BYTES;
        const unsigned long long left = lengths[piece] - offset;
        const unsigned long long num_bytes = left < TILE_BYTES ? left : TILE_BYTES;
        const unsigned long long source = sources[piece] + offset, target = targets[piece] + offset;
        const char* from = reinterpret_cast<const char*>(source);
        char* to = reinterpret_cast<char*>(target);
        const unsigned long long misaligned = source | target;
        if ((misaligned & 15) == 0) copy_words<uint4>(from, to, num_bytes);
        else if ((misaligned & 3) == 0) copy_words<unsigned int>(from, to, num_bytes);
        else copy_words<char>(from, to, num_bytes);
    }
}
"""


@dataclass
class _Slot:
    """One list on its way. It may be written again once `used` is done."""

    on_host: PinnedBuffer
    on_device: int
    used: Event | None = None


class PieceCopier:
    """Copies on a stream of its own. Used by one thread at a time."""

    def __init__(self, device: CudaDevice) -> None:
        """Takes `NUM_SLOTS * LIST_BYTES` of pinned and as much device memory. Raises CudaUnusable."""
        self.stream: Stream = device.new_stream()
        self._device = device
        try:
            self._kernel = device.compile(KERNEL, KERNEL_NAME)
            self._slots = [
                _Slot(device.allocate_pinned(LIST_BYTES), device.allocate(LIST_BYTES)) for _ in range(NUM_SLOTS)
            ]
        except RuntimeError as error:
            raise CudaUnusable(f"the copy kernel cannot be prepared: {error}") from error
        self._next_slot = 0

    def copy(self, plan: CopyPlan) -> Event:
        """Begin; the event tells when the targets hold their bytes. They must not overlap."""
        for first in range(0, len(plan), LIST_PIECES):
            some = slice(first, first + LIST_PIECES)
            self._launch(CopyPlan(plan.sources[some], plan.targets[some], plan.lengths[some]))
        return self._device.record(self.stream)

    def close(self) -> None:
        """Nothing may be under way."""
        for slot in self._slots:
            self._device.free(slot.on_device)
        self._slots = []

    def _launch(self, plan: CopyPlan) -> None:
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % NUM_SLOTS
        if slot.used is not None:
            wait_for(slot.used, _SLOT_WAIT_S)
        count = len(plan)
        num_tiles = (plan.lengths + np.uint64(TILE_BYTES - 1)) // np.uint64(TILE_BYTES)
        listed = slot.on_host.array[: count * 32].view(np.uint64).reshape(4, count)
        listed[0], listed[1], listed[2] = plan.sources, plan.targets, plan.lengths
        ends = np.cumsum(num_tiles, dtype=np.uint64)
        listed[3] = ends - num_tiles
        total = int(ends[-1])
        self._device.upload(slot.on_device, slot.on_host.address, listed.nbytes, self.stream)
        arguments = (np.uint64(slot.on_device), np.uint32(count), np.uint32(total))
        self._device.launch(self._kernel, min(total, MAX_THREAD_BLOCKS), NUM_THREADS, arguments, self.stream)
        slot.used = self._device.record(self.stream)


def wait_for(event: Event, within_s: float) -> None:
    """Block the calling thread, asleep, until the device has come to `event`. Raises CudaUnusable after that time."""
    until_s = time.monotonic() + within_s
    pause_s = 10e-6
    while not event.done:
        if time.monotonic() >= until_s:
            raise CudaUnusable(f"the GPU did not finish a copy within {within_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)
