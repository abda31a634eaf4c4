"""What clients get, in a loop where engines take exactly as long as a cost model says."""

import random
from collections.abc import Iterable
from math import inf
from typing import Any

import pytest

from proxy.scheduling.capacity.costs import Caution, CostModel
from proxy.scheduling.place import Local, Remote
from proxy.scheduling.slo import OverloadPolicy
from tests.unit.proxy.scheduling.simulation import CHUNK, Request, Simulation, poisson
from tests.unit.proxy.scheduling.situations import first_place, scheduler, shape


def costs() -> CostModel:
    return CostModel(1000.0, 0.04)


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) * 99 // 100]


def by_arrival(*kinds: list[Request]) -> list[Request]:
    return sorted((request for kind in kinds for request in kind), key=lambda request: request.arrived_s)


def first_come_first_served(requests: list[Request]) -> None:
    """On one engine, in the same chunks."""
    engine, free_s = costs(), 0.0
    for request in requests:
        free_s = max(free_s, request.arrived_s)
        for start in range(0, request.shape.num_prompt_tokens, CHUNK):
            free_s += engine.prefill_s(min(CHUNK, request.shape.num_prompt_tokens - start), start)
        request.first_token_s = free_s


def test_short_prompts_behind_long_ones_get_their_first_token_five_times_sooner_at_little_cost_to_the_long() -> None:
    def work() -> list[Request]:
        return by_arrival(
            poisson(0.6, 300, shape(100, name="chat", ttft_s=1.0), "chat", seed=3),
            poisson(0.2, 300, shape(3000, name="batch", ttft_s=30.0), "batch", seed=4),
        )

    fcfs, ours = work(), work()
    first_come_first_served(fcfs)
    Simulation(scheduler("p0", "d0"), ["p0"], costs).run(ours)

    def ttfts(requests: list[Request], kind: str) -> list[float]:
        return [request.ttft_s for request in requests if request.request_id.startswith(kind)]

    assert p99(ttfts(ours, "chat")) * 5 <= p99(ttfts(fcfs, "chat"))
    assert p99(ttfts(ours, "batch")) <= p99(ttfts(fcfs, "batch")) * 1.1


def goodput(overload: OverloadPolicy, load: float, seconds: float = 40.0) -> tuple[float, Simulation, list[Request]]:
    """Requests in time per second, at a multiple of what two prefill workers can do."""
    requests = poisson(2 / costs().prefill_s(500) * load, seconds, shape(500, on_overload=overload), "r", seed=1)
    simulation = Simulation(scheduler("p0", "p1", "d0", "d1"), ["p0", "p1"], costs)
    simulation.run(requests)
    assert simulation.scheduler.num_waiting == 0
    assert simulation.scheduler.books.held == {}
    return sum(request.in_time for request in requests) / seconds, simulation, requests


@pytest.mark.parametrize(("longest_step_s", "in_time"), [(0.2, True), (inf, False)])
def test_whether_a_strict_request_is_in_time_depends_on_the_steps_of_the_long_prompt_before_it(
    longest_step_s: float, in_time: bool
) -> None:
    pools = scheduler("p0", "d0")
    busy = Remote("p0", "d0", "remote")
    assert first_place(pools, shape(3000, ttft_s=30.0, longest_step_s=longest_step_s), "report") == busy
    # A step of a whole chunk takes half a second.
    chat = first_place(pools, shape(100, ttft_s=0.4), "chat", 0.01)
    assert chat == (busy if in_time else Local("d0", "prefill_late"))


def test_what_delays_long_prompts_does_not_make_predictions_for_strict_ones_timid() -> None:
    caution = Caution()
    for _ in range(50):
        caution.observe("report", 2.5, 5.0)
        caution.observe("chat", 0.7, 0.7)
    assert caution.of("report") > 1.9
    assert caution.of("chat") == caution.of("never seen") == Caution.LEAST


@pytest.mark.parametrize("overload", ["reject", "demote"])
def test_at_four_times_capacity_as_many_requests_are_in_time_as_ever(overload: OverloadPolicy) -> None:
    peak = max(goodput(overload, load)[0] for load in (0.8, 1.0, 1.3))
    at_four, simulation, requests = goodput(overload, 4.0)
    assert at_four >= 0.9 * peak
    if overload == "reject":
        assert simulation.max_waiting < 20
        refused = [request for request in requests if request.refused is not None]
        assert len(refused) > len(requests) / 2
        assert max((request.refused_s or 0.0) - request.arrived_s for request in refused) < 0.1
        assert all(request.refused.retry_after_s for request in refused if request.refused is not None)


def test_a_decode_pool_that_is_full_lets_requests_be_refused_early_too() -> None:
    requests = poisson(8.0, 60.0, shape(200, 100, on_overload="reject"), "r", seed=2, output_tokens=100)
    pools = scheduler("p0", "p1", "d0")
    pools.observe_load("d0", 0, 4 * -(-300 // 16))
    Simulation(pools, ["p0", "p1"], costs, step_s=0.02).run(requests)
    refused = [request for request in requests if request.refused is not None]
    answered = [request for request in requests if request.first_token_s is not None]
    assert len(refused) + len(answered) == len(requests)
    assert len(answered) > 80, "four at a time, two seconds each"
    waited_s = [(request.refused_s or 0.0) - request.arrived_s for request in refused if request.arrived_s > 10.0]
    assert sum(wait_s < 0.1 for wait_s in waited_s) > 0.95 * len(waited_s), "once the pace is known"
    assert sum(request.in_time for request in answered) > 0.9 * len(answered)


def test_what_workers_really_take_is_learned_and_goodput_holds() -> None:
    """The engines are half as fast as was believed."""
    requests = poisson(4.0, 60.0, shape(500, on_overload="reject"), "r", seed=5)
    Simulation(scheduler("p0", "d0"), ["p0"], lambda: CostModel(500.0, 0.04)).run(requests)
    answered = [request for request in requests if request.first_token_s is not None]
    late = [request for request in answered if not request.in_time and request.arrived_s > 15.0]
    assert len(answered) > 45
    assert len(late) <= 2


# ---------------------------------------------------------------------------------------------------- many chats

SYSTEM, QUESTION, ANSWER = 800, 150, 60


class ChatCaches:
    """What two prefill workers have computed: per chat, and of the prompt that all chats begin with."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, int]] = {"p0": {}, "p1": {}}

    def cached_tokens(self, chat: Any) -> dict[str, int]:
        found = {w: min(chat[1] - 1, known.get(chat[0], known.get(-1, 0))) for w, known in self.tokens.items()}
        return {worker: tokens for worker, tokens in found.items() if tokens}


@pytest.mark.parametrize("chats_per_s", [0.3, 1.0])
def test_chats_find_their_prefix_again_and_both_prefill_workers_do_their_part(chats_per_s: float) -> None:
    draw, caches, requests, begins_s = random.Random(7), ChatCaches(), [], 0.0
    for chat in range(40):
        begins_s += draw.expovariate(chats_per_s)
        at_s = begins_s
        for turn in range(6):
            tokens = SYSTEM + (turn + 1) * QUESTION + turn * ANSWER
            request = shape(tokens, ANSWER, prompt_hashes=(chat, tokens))
            requests.append(Request(f"{chat}.{turn}", request, at_s, ANSWER))
            at_s += 2.0 + draw.expovariate(1 / 8.0)

    def cached(worker: str, request: Request) -> int:
        return caches.cached_tokens(request.shape.prompt_hashes).get(worker, 0)

    def prefilled(worker: str, request: Request) -> None:
        chat, tokens = request.shape.prompt_hashes
        caches.tokens[worker] |= {chat: tokens, -1: SYSTEM}

    pools = scheduler("p0", "p1", "d0", prefixes=caches)
    Simulation(pools, ["p0", "p1"], costs, cached=cached, on_prefilled=prefilled).run(by_arrival(requests))
    wanted = sum(request.shape.num_prompt_tokens for request in requests)
    ideal = wanted - SYSTEM - 40 * (6 * QUESTION + 5 * ANSWER)
    computed = [sum(r.computed_tokens for r in requests if r.prefilled_by == worker) for worker in ("p0", "p1")]
    assert wanted - sum(computed) >= 0.9 * ideal
    assert max(computed) <= 1.3 * sum(computed) / 2
