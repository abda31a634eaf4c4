"""A worker without an engine: speaks `cluster.messages` on a real ZMQ socket and generates by arithmetic.

The next token is a function of all tokens so far, so an answer that came through two workers is right only if it is
the answer of one. A fake decode worker learns token 1 from the proxy's `FirstToken`, or from `exchange` (what a
prefill worker's `Done` would have told it) when the exchange is open.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
import zmq.asyncio
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cluster import messages
from cluster.host.drain import Carried
from cluster.host.drain_watch import DrainWatch

MODEL = "fake-model"
EOS = 2
VOCAB = 900
BLOCK_SIZE = 16


def next_token(tokens: Sequence[int]) -> int:
    """The only model here."""
    return 10 + (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % (VOCAB - 10)


def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request with this prompt must answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Exchange:
    """What prefill workers' ranks tell decode workers' ranks."""

    def __init__(self) -> None:
        self.first_tokens: dict[str, int] = {}
        self.finished: dict[str, asyncio.Event] = {}

    def event(self, transfer_id: str) -> asyncio.Event:
        return self.finished.setdefault(transfer_id, asyncio.Event())


class FakeWorker:
    """One life of one worker."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        exchange: Exchange,
        *,
        fingerprint: str = "f1",
        max_model_len: int = 4096,
        max_num_seqs: int = 8,
        heartbeat_s: float = 0.05,
        model: str = MODEL,
        protocol: int = messages.PROTOCOL_VERSION,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = uuid.uuid4().hex
        self.exchange = exchange
        self.num_tokens = 0
        self.submitted: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.dropped: list[str] = []
        self.held: list[str] = []
        self.met: list[str] = []
        """Addresses of exporters to get ready for."""
        self.first_tokens: dict[str, int] = {}
        self.utilities: list[tuple[str, Any]] = []
        self.cache_told_anew = 0
        """How often the proxy asked for everything in the prefix cache."""
        self.rejected = ""
        self.welcomed = asyncio.Event()
        self.gate = asyncio.Event()
        """Nothing is computed while it is clear."""
        self.gate.set()
        self.close_gate_after = -1
        """The gate closes by itself after so many tokens."""
        self.close_gate_at = ""
        """It closes when a leg is `started`, `computed` (before the proxy is told) or `loaded`."""
        self.step_s = 0.0
        self.output_delay_s = 0.0
        """The ranks tell each other the first token before the engine tells the host."""
        self.utility_error = ""
        self.force_first_token: int | None = None
        self.handover_outcome = "loaded"
        self.say_started = True
        self.tokens_per_report = 0
        """Tokens it claims to have computed since the last report."""
        self._tokens_computed = 0
        self._hello_facts = (fingerprint, max_model_len, model, protocol)
        self._max_num_seqs = max_num_seqs
        self._heartbeat_s = heartbeat_s
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._work: dict[str, asyncio.Task[None]] = {}
        self._token_known: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.drain = DrainWatch(worker_id, worker_id.split("-")[0], self._carried, self._retell, self._drop)
        self.left = ""
        """Why it said goodbye."""
        self._retold: list[asyncio.Task[None]] = []
        self._dropped_all = 0

    @property
    def role(self) -> str:
        return self.drain.role

    def _carried(self) -> Carried:
        return Carried(len(self.running), 0, -math.inf, has_proxy=True)

    def _retell(self) -> None:
        self._retold.append(asyncio.create_task(self.hello(self._dropped_all)))

    async def _drop(self) -> None:
        self._dropped_all += 1
        for task in self._work.values():
            task.cancel()

    async def _leave_when_drained(self) -> None:
        self.left = await self.drain.run()
        await self.say(messages.Goodbye(self.worker_id, self.epoch, self.left))

    @property
    def running(self) -> set[str]:
        """Engine request ids that have not ended."""
        return {i for i, task in self._work.items() if not task.done()}

    def open_gate(self) -> None:
        """From now on it works without a stop."""
        self.close_gate_at, self.close_gate_after = "", -1
        self.gate.set()

    async def start(self) -> "FakeWorker":
        coroutines = (self._read(), self._beat(), self._leave_when_drained())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        await self.hello()
        return self

    async def hello(self, proxies_lost: int = 0) -> None:
        fingerprint, max_model_len, model, protocol = self._hello_facts
        facts = messages.EngineFacts(
            model, max_model_len, BLOCK_SIZE, 1000, self._max_num_seqs, 512, 1, "bfloat16", ["generate"]
        )
        await self.say(
            messages.WorkerHello(
                protocol,
                self.worker_id,
                self.role,
                self.epoch,
                proxies_lost,
                1,
                "here",
                facts,
                [messages.RankAddress(0, f"ipc://{self.worker_id}", self.epoch)],
                fingerprint,
                {"layout": fingerprint},
                self.drain.goal,
                self.drain.number,
            )
        )

    async def say(self, message: Any, frames: Sequence[Any] = ()) -> None:
        await self.socket.send_multipart([msgspec.msgpack.encode(message), *frames])

    async def outputs(self, *outputs: EngineCoreOutput) -> None:
        step = EngineCoreOutputs(outputs=list(outputs), scheduler_stats=SchedulerStats(num_running_reqs=1))
        await self.say(messages.Outputs(self.epoch), self._encoder.encode(step))

    def freeze(self) -> None:
        """Like SIGSTOP: nothing is read or sent any more."""
        for task in [*self._tasks, *self._work.values(), *self._retold]:
            task.cancel()

    async def stop(self) -> None:
        self.freeze()
        for task in [*self._tasks, *self._work.values(), *self._retold]:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.socket.close(linger=0)
        self._context.term()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self.welcomed.is_set() and not self.left:
                self._tokens_computed += self.tokens_per_report
                await self.say(self.load())

    def load(self) -> messages.WorkerLoad:
        return messages.WorkerLoad(
            self.worker_id,
            self.epoch,
            len(self.running),
            0,
            1000,
            990,
            10,
            0,
            0,
            0,
            {"host": 5},
            {"host": 0.5},
            {},
            0,
            {"ipc://x": "host: same machine"},
            tokens_computed=self._tokens_computed,
        )

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(messages.ToWorker)
        while True:
            frames = await self.socket.recv_multipart()
            message = decoder.decode(frames[0])
            match message:
                case messages.Welcome():
                    self.welcomed.set()
                case messages.Rejected(reason):
                    self.rejected = reason
                case messages.Submit(engine_request_id):
                    request = self._decoder.decode(frames[1:])
                    assert request.request_id == engine_request_id
                    self.submitted.append(request)
                    assert not self.left, "a request for a worker that was let go"
                    work = self._work[engine_request_id] = asyncio.create_task(self._run(request))
                    work.add_done_callback(lambda _task: self.drain.nudge())
                case messages.Abort(ids):
                    self.aborted += ids
                    for engine_request_id in ids:
                        if engine_request_id in self._work:
                            self._work[engine_request_id].cancel()
                case messages.Drain(goal, timeout_s):
                    self.drain.order(goal, timeout_s)
                case messages.NothingMore(number):
                    self.drain.nothing_more(number)
                case messages.DropTransfers(ids):
                    self.dropped += ids
                case messages.HoldTransfers(ids):
                    self.held += ids
                case messages.MeetExporters(workers):
                    self.met += [rank.address for ranks in workers for rank in ranks]
                case messages.FirstToken(transfer_id, token):
                    self.first_tokens[transfer_id] = token
                    self._known(transfer_id).set()
                case messages.TellCachedBlocks():
                    self.cache_told_anew += 1
                case messages.Utility(call_id, method, args):
                    self.utilities.append((method, msgspec.msgpack.decode(args)))
                    result = msgspec.Raw(msgspec.msgpack.encode(True))
                    await self.say(messages.UtilityReply(call_id, self.utility_error, result))

    def _known(self, transfer_id: str) -> asyncio.Event:
        return self._token_known.setdefault(transfer_id, asyncio.Event())

    async def _run(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        prompt = list(request.prompt_token_ids or ())
        await self.gate.wait()
        if transfer is not None and transfer["mode"] == "export":
            if self.say_started:
                await self.say(messages.PrefillStarted(transfer["transfer_id"]))
            await asyncio.sleep(self.step_s)
            await self._pass("started")
        if transfer is not None and transfer["mode"] == "import":
            prompt = await self._import(transfer, prompt)
            await self._pass("loaded")
        await self._decode(request, prompt, transfer)

    async def _pass(self, point: str) -> None:
        if self.close_gate_at == point:
            self.gate.clear()
        await self.gate.wait()

    async def _import(self, transfer: dict[str, Any], prompt: list[int]) -> list[int]:
        transfer_id = transfer["transfer_id"]
        if transfer["first_token"]:
            assert prompt[-1] == 0, "a placeholder was expected"
            waits = [
                asyncio.create_task(self._known(transfer_id).wait()),
                asyncio.create_task(self.exchange.event(transfer_id).wait()),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            token = self.exchange.first_tokens.get(transfer_id)
            prompt = [*prompt[:-1], self.first_tokens[transfer_id] if token is None else token]
        else:
            await self.exchange.event(transfer_id).wait()
        outcome = self.handover_outcome
        kind = "" if outcome == "loaded" else "peer_lost"
        closed = messages.HandoverClosed(transfer_id, outcome, kind, "host", 1024, len(prompt), 0.01, 0.002, 0.001)
        await self.say(closed)
        return prompt

    async def _decode(self, request: EngineCoreRequest, prompt: list[int], transfer: Any) -> None:
        params = request.sampling_params
        assert params is not None
        assert params.max_tokens is not None
        tokens = list(prompt)
        scheduled = EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED)
        for index in range(params.max_tokens):
            await self.gate.wait()
            await asyncio.sleep(self.step_s)
            token = next_token(tokens)
            if index == 0 and self.force_first_token is not None:
                token = self.force_first_token
            tokens.append(token)
            finish, stop_reason = self._finish(params, token, index)
            first = index == 0
            output = EngineCoreOutput(request.request_id, [token], finish_reason=finish, stop_reason=stop_reason)
            if params.logprobs is not None:
                output.new_logprobs = LogprobsLists(
                    np.array([[token]]), np.array([[-0.5]], dtype=np.float32), np.array([1]), None
                )
            if first:
                output.events = [scheduled]
                output.prefill_stats = PrefillStats(len(prompt), len(prompt), 7 if self.role == "prefill" else 5)
                if params.prompt_logprobs is not None:
                    rows = len(prompt) - 1
                    output.new_prompt_logprobs_tensors = LogprobsTensors(
                        torch.tensor(prompt[1:]).reshape(-1, 1),
                        torch.full((rows, 1), -1.5),
                        torch.ones(rows, dtype=torch.int64),
                    )
                if transfer is not None and transfer["mode"] == "export":
                    self.exchange.first_tokens[transfer["transfer_id"]] = token
                    self.exchange.event(transfer["transfer_id"]).set()
            if first:
                await asyncio.sleep(self.output_delay_s)
                await self._pass("computed")
            self.num_tokens += 1
            if self.num_tokens == self.close_gate_after:
                self.gate.clear()
            await self.outputs(output)
            if finish is not None:
                return

    def _finish(self, params: Any, token: int, index: int) -> tuple[FinishReason | None, int | None]:
        if token == EOS and not params.ignore_eos:
            return FinishReason.STOP, None
        if token in (params.stop_token_ids or ()):
            return FinishReason.STOP, token
        if index + 1 >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None
