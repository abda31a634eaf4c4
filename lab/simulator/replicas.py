"""Plain engines side by side, each with chunked prefill: what separating is compared with, in simulated time."""

from collections.abc import Sequence

import simpy

from lab.load.client import Record
from lab.load.plan import Session
from lab.simulator.costs import Costs
from lab.simulator.request import Request, record_of
from lab.simulator.workers import DecodeWorker
from proxy.scheduling.view import RequestShape


def serve_side_by_side(sessions: Sequence[Session], costs: Costs, num_replicas: int, chunk_tokens: int) -> list[Record]:
    """Sessions go round robin, as `lab.load.drive` sends them; only the first turn of each."""
    env = simpy.Environment()
    steps = costs.steps("decode")
    workers = [
        DecodeWorker(env, f"replica-{index}", steps, chunk_tokens, lambda _request, _worker: None)
        for index in range(num_replicas)
    ]
    requests: list[Request] = []

    def arrive() -> simpy.events.ProcessGenerator:
        for session in sorted(sessions, key=lambda session: session.start_s):
            yield env.timeout(max(0.0, session.start_s - env.now))
            turn = session.turns[0]
            worker = workers[session.number % num_replicas]
            shape = RequestShape(sum(piece.num_tokens for piece in turn.pieces), turn.output_tokens, True)
            name = f"{session.work}-{session.number}"
            request = Request(name, session.work, shape, turn.output_tokens, (), 0, env.now, decode=worker.worker_id)
            requests.append(request)
            worker.submit(request, 0)

    env.process(arrive())
    env.run()
    return [record_of(request, costs.first_token_s) for request in requests]
