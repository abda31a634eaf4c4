"""An exporter's and an importer's process, from outside."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from msgspec.structs import replace

from lab.links.arms.kinds import ArmFailed
from lab.links.messages import (
    Done,
    Failed,
    FromProcess,
    Move,
    Moved,
    Offer,
    Queue,
    Queued,
    Ready,
    Setup,
    ToProcess,
    Transfer,
    Withdraw,
)
from lab.links.shapes import BlockShape

_START_TIMEOUT_S = 60.0
_MARGIN_S = 10.0
"""For wiping and checking the cache, on top of what an order may take."""
_END_S = 3.0
_LOG_TAIL = 300

Answer = TypeVar("Answer", bound=FromProcess)


class PairLost(ArmFailed):
    """One of the two processes is gone, or answers no more."""


class _Process:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._decoder = msgspec.json.Decoder[FromProcess](FromProcess)
        search_path = os.pathsep.join([str(Path.cwd()), *(entry for entry in sys.path if entry)])
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lab.links.pair_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"PYTHONPATH": search_path},
                start_new_session=True,  # Ctrl-C is for the process that started it, which ends it
            )
        assert self._process.stdin
        assert self._process.stdout
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._unread = b""
        self.is_lost = False

    def tell(self, order: ToProcess) -> None:
        try:
            self._orders.write(msgspec.json.encode(order) + b"\n")
            self._orders.flush()
        except BrokenPipeError as error:
            raise self._lost(f"its process has ended: {self._last_words()}") from error

    def answer(self, timeout_s: float) -> FromProcess:
        """Raises ArmFailed, also when none comes in time."""
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise self._lost(f"no answer within {timeout_s:.0f} s")
                if not (read := os.read(self._answers.fileno(), 1 << 16)):
                    raise self._lost(f"its process has ended: {self._last_words()}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer = self._decoder.decode(line)
        if isinstance(answer, Failed):
            raise ArmFailed(answer.reason)
        return answer

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def begin_end(self) -> None:
        self.send_signal(signal.SIGCONT)
        try:
            self._orders.close()
        except BrokenPipeError:
            return  # it has ended

    def end(self, until_s: float) -> None:
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def kill(self) -> None:
        self._process.kill()

    def _lost(self, reason: str) -> PairLost:
        self.is_lost = True
        return PairLost(reason)

    def _last_words(self) -> str:
        code = self._process.wait(_END_S)
        words = self._log.read_text(errors="replace").strip()
        return f"exit status {code}, {words[-_LOG_TAIL:] or 'without a word'}"


class Pair:
    """Both processes, with a cache of the same shape each. To be used in a `with` block, which ends them.

    Orders raise ArmFailed when an arm did not do its work, and PairLost when nothing more can be asked of the pair.
    """

    def __init__(self, arms: Sequence[str], devices: tuple[int, int] | None = None) -> None:
        """`devices`: the GPUs of the exporter and of the importer; None for CPU memory."""
        self.arms = tuple(arms)
        self.num_blocks = 0
        """Of the cache that is set up."""
        self.unusable: dict[str, str] = {}
        """Arms that this machine cannot run, and why."""
        self._devices = devices or (None, None)
        self._directory = tempfile.TemporaryDirectory(prefix="twinpool-links-")
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        try:
            for role in ("exporter", "importer"):
                self._processes.append(_Process(Path(self._directory.name) / f"{role}.log"))
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(at_once=self.is_lost or error is not None)

    def begin_setup(self, shape: BlockShape, num_blocks: int) -> Setup:
        """Have the exporter allocate and fill its cache, beside other pairs that do the same."""
        self.num_blocks = num_blocks
        arms = [arm for arm in self.arms if arm not in self.unusable]
        setup = Setup(True, shape, num_blocks, arms, self._directory.name, self._devices[0])
        self._exporter.tell(setup)
        return setup

    def end_setup(self, begun: Setup) -> None:
        """The importer, too. What cannot run is in `unusable` from here on."""
        ready = self._expect(self._exporter, Ready, _START_TIMEOUT_S)
        arms = [arm for arm in begun.arms if arm in ready.offers]
        setup = replace(begun, is_exporter=False, arms=arms, device=self._devices[1], offers=ready.offers)
        self._importer.tell(setup)
        self.unusable |= ready.unusable | self._expect(self._importer, Ready, _START_TIMEOUT_S).unusable

    def move(self, arm: str, transfers: list[Transfer], timeout_s: float) -> float:
        """Seconds. An arm fails, too, when not every byte is as it should be."""
        self._offer(arm, transfers)
        self._importer.tell(Move(arm, transfers, timeout_s))
        return self._expect(self._importer, Moved, timeout_s + _MARGIN_S).seconds

    def queue(
        self, arm: str, large: Transfer | None, small: list[Transfer], pause_s: float, timeout_s: float
    ) -> Queued:
        """See the message `Queue`."""
        self._offer(arm, [*([large] if large else []), *small])
        self._importer.tell(Queue(arm, large, small, pause_s, timeout_s))
        queued = self._expect(self._importer, Queued, timeout_s + _MARGIN_S)
        self._exporter.tell(Withdraw(arm))
        self._expect(self._exporter, Done, _MARGIN_S)
        return queued

    def rest(self) -> None:
        """Stop both processes in their tracks: some libraries keep a core busy while they have nothing to do."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    @property
    def is_lost(self) -> bool:
        """Nothing more can be asked of it."""
        return any(process.is_lost for process in self._processes)

    @property
    def _exporter(self) -> _Process:
        return self._processes[0]

    @property
    def _importer(self) -> _Process:
        return self._processes[1]

    def _offer(self, arm: str, transfers: list[Transfer]) -> None:
        self._exporter.tell(Offer(arm, transfers))
        self._expect(self._exporter, Done, _MARGIN_S)

    def _expect(self, process: _Process, kind: type[Answer], timeout_s: float) -> Answer:
        answer = process.answer(timeout_s)
        if not isinstance(answer, kind):
            raise ArmFailed(f"an answer {type(answer).__name__} where {kind.__name__} was expected")
        return answer

    def _end(self, at_once: bool) -> None:
        until_s = time.monotonic() + _END_S
        for process in self._processes:
            if at_once:
                process.kill()
            process.begin_end()
        for process in self._processes:
            process.end(until_s)
        self._directory.cleanup()
