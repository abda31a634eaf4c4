"""What goes to front ends: outputs, collected until one message from a worker has been dealt with."""

from typing import Any

from proxy.dispatch.witness import Witness
from proxy.flights.events import LegKind
from proxy.legs.vllm_leg_outputs import (
    add_prompt_scores,
    batch,
    client_output,
    found_tokens,
    passed_on,
    prompt_scores,
)
from proxy.prefixes.prefix_feed import PrefixFeed
from proxy.trips.front_end import FrontEnd
from proxy.trips.trip import Trip


class Replies:
    """Makes outputs of legs outputs of requests. `local`: the front end of this process, which gets statistics too."""

    def __init__(self, local: FrontEnd, witness: Witness, prefixes: PrefixFeed) -> None:
        self._local = local
        self._witness = witness
        self._prefixes = prefixes
        self._batches: dict[FrontEnd, list[Any]] = {}

    def emit(self, trip: Trip, leg: LegKind, payload: Any, finished: bool, prefill: Any) -> bool:
        """Takes what a flight wants its client to have. False if the request ends with it, and in an error."""
        self._witness.output(trip, leg)
        if trip.num_outputs == 1:
            self._prefixes.found(trip.expected_cached_tokens, found_tokens(leg, payload, prefill))
        if trip.num_outputs == 1 and trip.shape.wants_prompt_scores:
            if trip.scores is not None:
                add_prompt_scores(payload, trip.scores)
            else:
                trip.scores = prompt_scores(prefill if prefill is not None else payload)
        if trip.sent is not None:
            trip.sent += payload.new_token_ids
        output = client_output(payload, trip.request_id, leg, finished, prefill, trip.shape.continues)
        self._batches.setdefault(trip.front_end, []).append(output)
        return str(output.finish_reason) != "error"

    def pass_on(self, trip: Trip, output: Any, now_s: float) -> None:
        """What `emit` comes to for most tokens; see `flights.transitions.passes_on`."""
        trip.num_outputs += 1
        trip.account.output(now_s)
        if trip.sent is not None:
            trip.sent += output.new_token_ids
        outputs = self._batches.get(trip.front_end)
        if outputs is None:
            outputs = self._batches[trip.front_end] = []
        outputs.append(passed_on(output, trip.request_id))

    def flush(self, worker_index: int, step: Any) -> None:
        """Gives each front end everything that one message led to, as one engine step; `step`: None if it was none."""
        batches, self._batches = self._batches, {}
        if step is not None and step.scheduler_stats is not None:
            batches.setdefault(self._local, [])
        for front_end, outputs in batches.items():
            front_end.take(batch(worker_index, outputs, step))
