"""What goes to workers: legs, what they need on their way, and their end; and which hand-over belongs to whom."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from cluster import messages
from proxy.flights.events import LegKind
from proxy.legs.urgency import Urgency, urgency_of
from proxy.legs.vllm_leg_requests import Exporter, LegRequests
from proxy.metrics import ProxyMetrics
from proxy.trips.legbook import Leg, Legbook
from proxy.trips.trip import Trip
from proxy.workers.roster import Loss
from proxy.workers.worker_pool import WorkerPool

LATE_NEWS_S = 60.0
"""How long the report of a hand-over is waited for after its request has ended."""


class Sending:
    """Owns every leg and every transfer id. Nothing in it waits."""

    def __init__(self, pool: WorkerPool, metrics: ProxyMetrics) -> None:
        self.legs = Legbook()
        self._pool = pool
        self._metrics = metrics
        self._requests = LegRequests()
        self._transfers: dict[str, Trip] = {}
        self._late_news: deque[tuple[float, str]] = deque()

    # ----------------------------------------------------------------------------------------------------- legs

    def prefill(self, trip: Trip, worker_id: str) -> None:
        """Sends the leg that computes the prompt, under a new transfer id."""
        trip.transfer_id = uuid.uuid4().hex
        self._transfers[trip.transfer_id] = trip
        self._metrics.remote_prefill_tokens.inc(trip.shape.num_prompt_tokens)
        trip.lifetime.note("prefill_submitted", time.monotonic())
        trip.expected_cached_tokens = self._pool.prefixes.expected(worker_id, trip.shape.prompt_hashes)
        engine_request_id = self.legs.open(trip, "prefill", worker_id)
        first_token = trip.shape.first_token_mode
        frames = self._requests.prefill(trip.rest, engine_request_id, trip.transfer_id, first_token, _urgency(trip))
        self._send(worker_id, messages.Submit(engine_request_id), frames)

    def decode(self, trip: Trip, worker_id: str) -> None:
        """Sends the leg that fetches the prompt's blocks and generates the rest."""
        trip.lifetime.note("decode_submitted", time.monotonic())
        exporter = Exporter(trip.flight.prefill, self._pool.roster.workers[trip.flight.prefill].hello.ranks)
        engine_request_id = self.legs.open(trip, "decode", worker_id)
        frames = self._requests.decode(
            trip.rest, engine_request_id, trip.transfer_id, trip.shape.first_token_mode, exporter, _urgency(trip)
        )
        self._send(worker_id, messages.Submit(engine_request_id), frames)

    def local(self, trip: Trip, worker_id: str) -> None:
        """Sends the leg that does everything."""
        self._metrics.local_prefill_tokens.inc(trip.shape.num_prompt_tokens)
        trip.lifetime.note("local_submitted", time.monotonic())
        trip.expected_cached_tokens = self._pool.prefixes.expected(worker_id, trip.shape.prompt_hashes)
        engine_request_id = self.legs.open(trip, "local", worker_id)
        scores_known = trip.scores is not None
        frames = self._requests.local(trip.rest, engine_request_id, _urgency(trip), scores_known)
        self._send(worker_id, messages.Submit(engine_request_id), frames)

    def more_input(self, trip: Trip, request: Any) -> bool:
        """Streamed input: the next chunk of a request, for the engine that has it. False if none has."""
        engine_request_id = trip.legs.get("local")
        if engine_request_id is None:
            return False
        frames = self._requests.local(request, engine_request_id, _urgency(trip))
        self._send(trip.flight.decode, messages.Submit(engine_request_id), frames)
        return True

    def first_token(self, trip: Trip, worker_id: str, token: int) -> None:
        """Tells a decode worker the token that the prefill worker sampled."""
        self._send(worker_id, messages.FirstToken(trip.transfer_id, token))

    def abort(self, trip: Trip, kind: LegKind, worker_id: str) -> None:
        """Ends a leg before its time, unless it has ended."""
        closed_id = self.close(trip, kind)
        if closed_id is not None:
            self._send(worker_id, messages.Abort([closed_id]))

    def close(self, trip: Trip, kind: LegKind) -> str | None:
        """A leg has ended; its id, or None if that is known."""
        if kind == "prefill":
            trip.lifetime.note("prefill_ended", time.monotonic())
        return self.legs.close(trip, kind)

    def lose(self, loss: Loss) -> list[Leg]:
        """The legs that a worker took along; there are none there any more."""
        lost = self.legs.lose(loss.worker_id)
        if lost and loss.kind in ("silent", "unreachable", "rejoined"):
            # It may only stand still: when it goes on, it must not work for nobody.
            self._pool.send(loss.worker_id, messages.Abort([leg.engine_request_id for leg in lost]))
        return lost

    # ------------------------------------------------------------------------------------------------ transfers

    def trip_of(self, transfer_id: str) -> Trip | None:
        """Whose hand-over this is, or was."""
        return self._transfers.get(transfer_id)

    def transfer_closed(self, transfer_id: str) -> Trip | None:
        """The same, for the last time."""
        return self._transfers.pop(transfer_id, None)

    def drop_transfer(self, trip: Trip, worker_id: str) -> None:
        """Tells a prefill worker that nobody will fetch the blocks."""
        self._send(worker_id, messages.DropTransfers([trip.transfer_id]))

    def expect_late_news(self, trip: Trip) -> None:
        """The report of a hand-over may come after its request has ended; metrics want it."""
        if trip.transfer_id in self._transfers:
            self._late_news.append((time.monotonic() + LATE_NEWS_S, trip.transfer_id))

    def forget_late_news(self, now_s: float) -> None:
        """Reports that will not come any more."""
        while self._late_news and self._late_news[0][0] <= now_s:
            self._transfers.pop(self._late_news.popleft()[1], None)

    def hold_leases(self, trips: Iterable[Trip]) -> None:
        """Tells prefill workers which leases are still wanted."""
        held: dict[str, list[str]] = {}
        for trip in trips:
            if trip.flight.lease_open and trip.flight.prefill:
                held.setdefault(trip.flight.prefill, []).append(trip.transfer_id)
        for worker_id, transfer_ids in held.items():
            self._pool.send(worker_id, messages.HoldTransfers(transfer_ids))

    def _send(self, worker_id: str, message: messages.ToWorker, frames: Sequence[Any] = ()) -> None:
        if not self._pool.send(worker_id, message, frames):
            # Not from within an action: losing the worker feeds every flight it carries, this one included.
            asyncio.get_running_loop().call_soon(self._pool.unreachable, worker_id)


def _urgency(trip: Trip) -> Urgency:
    """To its engine; who is demoted ranks there as if it had only just come."""
    now_s = time.monotonic()
    since_s = trip.lifetime.last("placed" if trip.demoted else "arrived")
    return urgency_of(trip.shape.standing, since_s if since_s is not None else now_s, now_s)
