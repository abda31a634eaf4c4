"""Which workers there are, which of them are alive, and who may talk. Pure: time is passed in.

A worker is known by its `worker_id`; one life of its process by its `epoch`. A hello with a new epoch is a new life:
what the old one carried is lost. Silence for `dead_after_s` means dead until it is heard again. A worker that drains is
alive and gets no new requests; what its hello says about that, and about its role, is true.
"""

from dataclasses import dataclass, field
from typing import Literal, cast

from cluster.messages import LEAVE, PROTOCOL_VERSION, WorkerHello, WorkerLoad
from cluster.pairing import differing_fields
from cluster.status import RefusedPair
from proxy.scheduling.view import Role, WorkerFacts

LossKind = Literal["silent", "exited", "left", "drained", "restarted", "unreachable", "rejoined"]
ENDS: tuple[LossKind, ...] = ("exited", "left", "drained", "restarted")
"""Of a life; the others may be heard again."""


def role_named_in(worker_id: str) -> str:
    """The role that a worker was started for, which is all that is known of it before it says hello."""
    return worker_id.rpartition("-")[0]


@dataclass(slots=True)
class Worker:
    """A worker that said hello."""

    hello: WorkerHello
    identity: bytes
    """ZMQ routing id of its connection."""
    index: int
    """Its number in vLLM's metrics; kept over restarts."""
    heard_s: float
    alive: bool = True
    load: WorkerLoad | None = None
    ordered: str = ""
    """Goal of a drain that it was told of and has not confirmed by a hello."""
    lost_by: LossKind | None = None
    """How it was lost, if it is not alive."""

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def role(self) -> Role:
        return cast(Role, self.hello.role)

    @property
    def drains_to(self) -> str:
        """`cluster.messages.LEAVE`, a role, or empty if it does not drain."""
        return self.ordered or self.hello.drains_to

    @property
    def takes_requests(self) -> bool:
        """New ones."""
        return self.alive and not self.drains_to


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that must be given up, with a sentence for clients and logs."""

    worker_id: str
    kind: LossKind
    cause: str


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a hello."""

    worker: Worker | None
    refused: str = ""
    """Why not, if `worker` is None."""
    lost: Loss | None = None
    """The earlier life that this hello ended."""
    joined: bool = False
    """It can do what it could not do before: it was not alive with this epoch, or in this role."""
    changed: bool = False
    """Placement must look again."""


@dataclass(slots=True)
class Roster:
    """All workers of the cluster."""

    models: frozenset[str]
    """Names under which workers may know the model (as configured, as resolved on disk)."""
    dead_after_s: float
    expected: tuple[str, ...] = ()
    """Ids of workers that are started by this cluster."""
    workers: dict[str, Worker] = field(default_factory=dict)
    by_identity: dict[bytes, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    """Why dead workers are dead, by worker id; also of those that never said hello."""
    restarts: bool = False
    """Whether processes that ended are started again, as a rule."""
    stays_down: set[str] = field(default_factory=set)
    """The exceptions: workers that are not started again."""
    gone_epochs: set[str] = field(default_factory=set)
    """Lives that said goodbye or exited; nothing they still had on the way counts."""
    differences: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """What forbids a pair, by the fingerprints of its prefill and decode worker; filled when one of them joins."""
    removed: set[str] = field(default_factory=set)
    """Workers that never come back."""
    _indices: dict[str, int] = field(default_factory=dict)
    """By worker id, in the order in which they were expected or joined; a number is never given twice."""

    def __post_init__(self) -> None:
        self._indices = {worker_id: index for index, worker_id in enumerate(self.expected)}

    def admit(self, identity: bytes, hello: WorkerHello, now_s: float) -> Admission:
        """Takes a worker in, or says why not."""
        if hello.protocol != PROTOCOL_VERSION:
            return Admission(
                None,
                f"it speaks protocol {hello.protocol}, this proxy speaks {PROTOCOL_VERSION}; "
                "start workers and proxy from the same installation",
            )
        if hello.role not in ("prefill", "decode"):
            return Admission(None, f"its role is {hello.role!r}; expected `prefill` or `decode`")
        if hello.engine.model not in self.models:
            ours = " or ".join(sorted(self.models))
            return Admission(None, f"it serves the model {hello.engine.model}, this cluster serves {ours}")
        if hello.worker_id in self.removed:
            return Admission(None, "it was removed from this cluster")
        if hello.epoch in self.gone_epochs:
            return Admission(None, f"this life of {hello.worker_id} (epoch {hello.epoch}) has already left")
        known = self.workers.get(hello.worker_id)
        if known is not None and known.hello.epoch == hello.epoch:
            return self._same_life(known, identity, hello, now_s)
        lost = None
        if known is not None:
            lost = self.lose(hello.worker_id, "restarted", f"Worker {hello.worker_id} restarted")
            self.by_identity.pop(known.identity, None)
        worker = Worker(hello, identity, self._index(hello.worker_id), now_s)
        self.workers[hello.worker_id] = worker
        self.stays_down.discard(hello.worker_id)
        self._compare_layouts()
        self.by_identity[identity] = hello.worker_id
        self.causes.pop(hello.worker_id, None)
        return Admission(worker, lost=lost, joined=True, changed=True)

    def _same_life(self, known: Worker, identity: bytes, hello: WorkerHello, now_s: float) -> Admission:
        """It repeats itself because our welcome was late, has dropped what it carried, drains, or has another role."""
        was_alive, took, old = known.alive, known.takes_requests, known.hello
        if (hello.drain, hello.drains_to) != (old.drain, old.drains_to):
            known.ordered = ""  # this is the answer
        self.by_identity.pop(known.identity, None)
        known.hello, known.identity, known.heard_s, known.alive = hello, identity, now_s, True
        self.by_identity[identity] = hello.worker_id
        self.causes.pop(hello.worker_id, None)
        moved = hello.role != old.role
        if moved:
            self._compare_layouts()
        lost = None
        if hello.proxies_lost != old.proxies_lost and was_alive:
            why = f"had no more time to drain as a {old.role} worker" if moved else "lost sight of the proxy"
            lost = Loss(hello.worker_id, "rejoined", f"Worker {hello.worker_id} {why} and dropped its requests")
        joined = moved or not was_alive
        return Admission(known, lost=lost, joined=joined, changed=joined or took != known.takes_requests)

    def order(self, worker_id: str, goal: str) -> Worker | None:
        """Notes that a worker is about to be told to drain: from now on it gets nothing new. None if it is not alive.

        A goal that it has already, drained or not, changes nothing.
        """
        worker = self.workers.get(worker_id)
        if worker is None or not worker.alive:
            return None
        if goal not in (worker.role, worker.hello.drains_to) and worker.hello.drains_to != LEAVE:
            worker.ordered = goal
        return worker

    def _compare_layouts(self) -> None:
        """Once per pair of layouts, not per request."""
        kinds = {
            (prefill.hello.fingerprint, decode.hello.fingerprint): (prefill.hello, decode.hello)
            for prefill in self.workers.values()
            for decode in self.workers.values()
            if (prefill.role, decode.role) == ("prefill", "decode")
        }
        self.differences = {
            layouts: self.differences[layouts]
            if layouts in self.differences
            else [str(field) for field in differing_fields(prefill.layout_fields, decode.layout_fields)]
            for layouts, (prefill, decode) in kinds.items()
            if layouts[0] != layouts[1]
        }

    def _index(self, worker_id: str) -> int:
        return self._indices.setdefault(worker_id, len(self._indices))

    def await_worker(self, worker_id: str) -> None:
        """A further worker is being started."""
        self.expected = (*self.expected, worker_id)
        self._index(worker_id)

    def remove(self, worker_id: str) -> None:
        """A worker that is not alive, or never was, does not come back: nothing is known of it any more."""
        self.removed.add(worker_id)
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.gone_epochs.add(worker.hello.epoch)
            self.by_identity.pop(worker.identity, None)
            self._compare_layouts()
        self.causes.pop(worker_id, None)
        self.stays_down.discard(worker_id)
        self.expected = tuple(name for name in self.expected if name != worker_id)

    def heard(self, identity: bytes, worker_id: str | None, epoch: str | None, now_s: float) -> Worker | None:
        """Notes a sign of life. None if the sender is unknown, or speaks for another worker or another life.

        `worker_id` and `epoch` are what the message says of its sender, if it says anything.
        """
        worker = self.workers.get(self.by_identity.get(identity, ""))
        if worker is None and worker_id is not None and epoch is not None:
            # The same life over a new connection.
            worker = self.workers.get(worker_id)
            if worker is not None and worker.hello.epoch == epoch:
                self.by_identity.pop(worker.identity, None)
                self.by_identity[identity] = worker_id
                worker.identity = identity
        if worker is None or worker.hello.epoch in self.gone_epochs:
            return None
        if epoch not in (None, worker.hello.epoch) or worker_id not in (None, worker.worker_id):
            return None
        worker.heard_s = now_s
        return worker

    def report(self, worker: Worker, load: WorkerLoad) -> bool:
        """Takes a load report; True if that brought the worker back to life."""
        worker.load = load
        revived = not worker.alive
        worker.alive = True
        self.causes.pop(worker.worker_id, None)
        return revived

    def lose(self, worker_id: str, kind: LossKind, cause: str) -> Loss | None:
        """Marks a worker dead; None if it was dead already or never known. Silent workers may come back."""
        worker = self.workers.get(worker_id)
        if worker_id in self.removed and worker is None:
            return None
        if worker is None or worker.alive:
            self.causes[worker_id] = cause
        if worker is None:
            return None
        if kind in ENDS:
            self.gone_epochs.add(worker.hello.epoch)
        if worker.alive or (kind in ENDS and worker.lost_by not in ENDS):
            worker.lost_by = kind
        if not worker.alive:
            return None
        worker.alive, worker.ordered = False, ""
        return Loss(worker_id, kind, cause)

    def expect(self, worker_id: str, returns: bool) -> None:
        """Whether a worker whose process ended comes back."""
        if worker_id in self.removed:
            return
        (self.stays_down.discard if returns else self.stays_down.add)(worker_id)

    def _in_transition(self, worker: Worker) -> bool:
        """It, or whoever takes its place, is worth waiting for."""
        if worker.alive:
            return not worker.takes_requests
        is_replaced = worker.lost_by == "drained" and worker.worker_id not in self.stays_down
        return is_replaced or self._comes_back(worker)

    def _comes_back(self, worker: Worker) -> bool:
        return self.restarts and worker.lost_by in ENDS and worker.worker_id not in self.stays_down

    def coming_back(self, role: Role) -> list[Worker]:
        """Dead workers whose process is started again."""
        return [w for w in self.workers.values() if w.role == role and not w.alive and self._comes_back(w)]

    def forgive(self, late_s: float) -> None:
        """The proxy did not listen for `late_s`; that much silence does not count."""
        for worker in self.workers.values():
            worker.heard_s += late_s

    def silent(self, now_s: float) -> list[Loss]:
        """Gives up everyone not heard for `dead_after_s`."""
        overdue = [w for w in self.workers.values() if w.alive and now_s - w.heard_s > self.dead_after_s]
        losses = (
            self.lose(w.worker_id, "silent", f"Worker {w.worker_id} was not heard for {now_s - w.heard_s:.1f} s")
            for w in overdue
        )
        return [loss for loss in losses if loss is not None]

    def alive(self, role: Role | None = None) -> list[Worker]:
        """Living workers in the order of their indices."""
        living = [w for w in self.workers.values() if w.alive and role in (None, w.role)]
        return sorted(living, key=lambda w: w.index)

    def taking_requests(self, role: Role | None = None) -> list[Worker]:
        """Living workers that do not drain."""
        return [worker for worker in self.alive(role) if worker.takes_requests]

    def draining(self) -> list[Worker]:
        """Living workers that take no new requests."""
        return [worker for worker in self.alive() if not worker.takes_requests]

    @property
    def max_model_len(self) -> int:
        """Tokens that every living worker accepts; unlimited if there is none."""
        return min((w.hello.engine.max_model_len for w in self.alive()), default=1 << 62)

    @property
    def expects_prefill(self) -> bool:
        """Whether the cluster shall have prefill workers; one without is complete with a decode worker."""
        return any(role_named_in(worker_id) == "prefill" for worker_id in self.expected)

    def facts(self) -> list[WorkerFacts]:
        """Of the workers that take requests, in the order of their indices."""
        return [
            WorkerFacts(
                worker_id=worker.worker_id,
                role=worker.role,
                epoch=worker.hello.epoch,
                index=worker.index,
                fingerprint=worker.hello.fingerprint,
                max_model_len=worker.hello.engine.max_model_len,
                block_size=worker.hello.engine.block_size,
                num_blocks=worker.hello.engine.num_blocks,
                max_num_seqs=worker.hello.engine.max_num_seqs,
                max_num_batched_tokens=worker.hello.engine.max_num_batched_tokens,
            )
            for worker in self.taking_requests()
        ]

    def awaited(self) -> frozenset[Role]:
        """Roles of workers that take no requests and are worth waiting for, as are those that take their places."""
        return frozenset(worker.role for worker in self.workers.values() if self._in_transition(worker))

    @property
    def compatible(self) -> frozenset[tuple[str, str]]:
        """Layouts of prefill and decode workers that differ and can exchange blocks all the same."""
        return frozenset(layouts for layouts, forbid in self.differences.items() if not forbid)

    def refused_pairs(self) -> list[RefusedPair]:
        """Living workers that are never placed together, and the fields of their layouts that forbid it."""
        return [
            RefusedPair(prefill.worker_id, decode.worker_id, forbidding)
            for prefill in self.alive("prefill")
            for decode in self.alive("decode")
            if (forbidding := self.differences.get((prefill.hello.fingerprint, decode.hello.fingerprint)))
        ]

    def has_pair(self) -> bool:
        """Some living prefill worker can hand over to some living decode worker."""
        return len(self.refused_pairs()) < len(self.alive("prefill")) * len(self.alive("decode"))
