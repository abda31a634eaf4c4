"""An engine that costs nothing, in a process of its own, behind vLLM's own sockets.

`python -m lab.proxy_cost.engine_process INPUT_ADDRESS OUTPUT_ADDRESS MODEL STEP_S` speaks what vLLM 0.32's
`AsyncMPClient` and its engine processes say to each other: a DEALER to the client's ROUTER, a PUSH to its PULL, request
types of one byte, frames of vLLM's encoder. The engine is the simulated one, as behind twinpool's own proxy. Imports
neither torch nor vLLM. Ends when its standard input does.

Relies on vLLM 0.32, checked by `tests/unit/lab/proxy_cost/test_vllm_internals.py`: `EngineCoreRequestType`,
`EngineCoreOutputs.utility_output`, that an empty message says `ready`.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
import zmq.asyncio

from cluster.config import SimulationConfig
from cluster.simulated.engine.cost import CostModel
from cluster.simulated.engine.paged_engine import SimulatedEngine
from cluster.simulated.engine.vllm_frames import Outputs, outputs_frames, read_request
from cluster.simulated.engine.vocabulary import Vocabulary, word_tokens


def free_engine(step_s: float) -> dict[str, Any]:
    """The simulation of an engine that costs nothing, here and behind twinpool: nothing waits for room.

    `step_s`: how long it takes its time over a decode step; 0: it answers at once.
    """
    return {
        "speed": "modelled" if step_s else "instant",
        "decode_step_s": step_s,
        "decode_s_per_sequence": 0.0,
        "decode_s_per_kv_token": 0.0,
        "prefill_tokens_per_s": 1e12,
        "chunk_s": 0.0,
        "attention_s_per_pair": 0.0,
        "kv_bytes_per_token": 0,
        "num_blocks": 16_384,
        "max_num_batched_tokens": 32_768,
        "prefix_caching": False,
        "eos_every": 0,
    }


MAX_MODEL_LEN = 2048

_LATE_S = 0.1
"""As a simulated worker: what is further behind does not try to catch up."""

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
IDENTITY = (0).to_bytes(2, "little")
TASKS = ("generate",)


class UtilityOutputs(msgspec.Struct, array_like=True):
    """`EngineCoreOutputs` with nothing but the answer to a call: (call id, failure, (type, result))."""

    engine_index: int
    outputs: list[Any]
    scheduler_stats: None
    timestamp: float
    utility_output: tuple[int, str | None, tuple[None, Any]]


class FreeEngine:
    """One engine core, as `AsyncMPClient` knows it."""

    def __init__(self, input_address: str, output_address: str, model: Path, step_s: float) -> None:
        simulation = SimulationConfig(enabled=True, **free_engine(step_s))
        vocabulary = Vocabulary(word_tokens(model), simulation.eos_every)
        self._engine = SimulatedEngine(simulation, MAX_MODEL_LEN, CostModel(simulation, "free"), vocabulary)
        self._work_came = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, IDENTITY)
        self._output = self._context.socket(zmq.PUSH)
        self._addresses = (input_address, output_address)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`."""
        for socket, address in zip((self._input, self._output), self._addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        await self._input.send(b"")  # it is ready, and has nothing to correct in the client's configuration
        tasks = [asyncio.create_task(work) for work in (self._read(), self._compute(), stop.wait())]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*left)
        self._context.destroy(linger=0)
        for task in done:
            task.result()

    async def _read(self) -> None:
        while True:
            kind, *frames = await self._input.recv_multipart()
            if kind == ADD:
                self._engine.add(read_request(frames), time.monotonic())
                self._work_came.set()
            elif kind == ABORT:
                for request_id in msgspec.msgpack.decode(frames[0]):
                    self._engine.abort(request_id)
            elif kind == UTILITY:
                await self._answer(frames)

    async def _answer(self, frames: Sequence[bytes]) -> None:
        _client, call_id, method, _arguments = msgspec.msgpack.decode(frames[0])
        result = TASKS if method == "get_supported_tasks" else None
        answer = UtilityOutputs(0, [], None, time.monotonic(), (call_id, None, (None, result)))
        await self._output.send(self._encoder.encode(answer))

    async def _compute(self) -> None:
        due_s = time.monotonic()
        while True:
            step = self._engine.plan(time.monotonic())
            if step is None:
                self._work_came.clear()
                await self._work_came.wait()
                due_s = time.monotonic()
                continue
            due_s = max(due_s, time.monotonic() - _LATE_S) + step.seconds
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))  # requests come in between steps
            now_s = time.monotonic()
            outputs = self._engine.finish(step, now_s)
            sent = Outputs(outputs=outputs, scheduler_stats=self._engine.take_stats(), timestamp=now_s)
            await self._output.send_multipart(outputs_frames(sent))


async def _main(input_address: str, output_address: str, model: str, step_s: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Whoever started it keeps the other end and writes nothing.
    loop.add_reader(sys.stdin.fileno(), stop.set)
    try:
        await FreeEngine(input_address, output_address, Path(model), float(step_s)).run(stop)
    finally:
        loop.remove_reader(sys.stdin.fileno())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(*sys.argv[1:]))
