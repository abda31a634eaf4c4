"""Brings up each arm in turn, warms it, applies the same load, takes it down."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.preflight.machine import Machine
from lab.experiments.arms import CLASS_HEADER, SERVED_NAME, launches, setup
from lab.experiments.experiment import (
    Arm,
    DisaggregatedArm,
    Experiment,
    ExperimentError,
    SearchSettings,
    TeachingArm,
)
from lab.experiments.goodput import GoodputSearch
from lab.experiments.observe import held, kv_bytes, steps_since, watch_shapes
from lab.experiments.results import Results, Run, StepShape
from lab.load.client import Target
from lab.load.drive import Load
from lab.load.plan import plan_sessions
from lab.load.prompts import Prompts, local_tokenizer
from lab.load.summary import summarize
from lab.server_process import Server, ServerFailed
from lab.streams import StreamFailed, one_by_one, random_prompt

_WARM_UP_OUTPUT = 4
_WARM_UP_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 600.0

Say = Callable[[str], None]


def run_experiment(
    experiment: Experiment, model: str, machine: Machine, directory: Path, results: Results, say: Say
) -> None:
    """Fills `results` run by run, so that an interruption leaves what there is. Raises `ExperimentError`."""
    prompts = Prompts(local_tokenizer(Path(model)))
    for number, arm in enumerate(experiment.arms, start=1):
        say(f"arm {number} of {len(experiment.arms)}: {arm.name}")
        try:
            _run_arm(experiment, arm, model, machine, directory, prompts, results, say)
        except (ServerFailed, StreamFailed, ExperimentError) as error:
            results.skipped[arm.name] = str(error).strip()
            say(f"  {arm.name} failed: {str(error).strip().splitlines()[0]}")
    if not results.runs:
        raise ExperimentError("no arm ran: " + "; ".join(f"{name}: {why}" for name, why in results.skipped.items()))


def _run_arm(
    experiment: Experiment,
    arm: Arm,
    model: str,
    machine: Machine,
    directory: Path,
    prompts: Prompts,
    results: Results,
    say: Say,
) -> None:
    began_s = time.monotonic()
    servers: list[Server] = []
    try:
        for launch in launches(experiment, arm, model, machine, directory):
            servers.append(Server(launch, directory))  # noqa: PERF401 - those that have started must be ended
        for server in servers:
            server.wait_until_healthy()
        start_s = time.monotonic() - began_s
        _warm_up(servers, experiment.warm_up_tokens)
        say(f"  up after {start_s:.0f} s")

        def measure(rate: float, repeat: int) -> Run:
            texts = sum(run.arm == arm.name for run in results.runs)
            run = asyncio.run(_measure(experiment, arm, servers, prompts, rate, experiment.seed + repeat, texts))
            run.start_s = start_s
            run.setup = setup(experiment, arm, machine)
            results.runs.append(run)
            total = run.summary.total
            good = "" if total.attained is None else f", {100 * total.attained:.0f} % within both limits"
            say(f"  rate x {rate:.3g}, seed {run.seed}: {total.whole} of {total.offered} whole{good}")
            return run

        if experiment.search is not None:
            _search(experiment.search, arm, measure, results)
            return
        for rate, repeat in itertools.product(experiment.rates, range(experiment.repeats)):
            measure(rate, repeat)
    finally:
        for server in servers:
            server.stop()


def _search(settings: SearchSettings, arm: Arm, measure: Callable[[float, int], Run], results: Results) -> None:
    search = GoodputSearch(settings.lowest, settings.highest, settings.attained, settings.steps, settings.seeds)
    while (wanted := search.next_run()) is not None:
        run = measure(*wanted)
        search.note(run.rate, run.summary.total.good or 0, run.summary.total.offered)
    results.goodput[arm.name] = search.bounds


def _warm_up(servers: Sequence[Server], lengths: Sequence[int]) -> None:
    rng = random.Random(0)
    for server in servers:
        warm = [random_prompt(rng, length) for length in lengths]
        asyncio.run(one_by_one(server.url, SERVED_NAME, warm, _WARM_UP_OUTPUT, _WARM_UP_TIMEOUT_S))


async def _measure(
    experiment: Experiment, arm: Arm, servers: Sequence[Server], prompts: Prompts, rate: float, seed: int, texts: int
) -> Run:
    """`texts`: a number of its own for every load that the same servers get."""
    classes = experiment.classes(arm, rate)
    sessions = plan_sessions(classes, experiment.seconds, seed, experiment.process, texts=texts)
    targets = [
        Target(server.url, SERVED_NAME, {}, {"ignore_eos": True, "return_token_ids": True}, _REQUEST_TIMEOUT_S)
        for server in servers
    ]
    class_header = CLASS_HEADER if isinstance(arm, DisaggregatedArm) else ""
    load = Load(targets, sessions, prompts, lambda _record: None, class_header)
    shapes: list[StepShape] = []
    moved, before = await kv_bytes(servers), await held(servers)
    began_s = time.monotonic()
    watching = None if isinstance(arm, TeachingArm) else asyncio.create_task(watch_shapes(servers, shapes))
    try:
        async with asyncio.timeout(experiment.seconds + experiment.drain_s):
            await load.run()
    except TimeoutError:
        pass  # what was open is recorded as cut off
    finally:
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    if isinstance(arm, TeachingArm):
        shapes = await steps_since(servers[0], began_s)
    elapsed_s = time.monotonic() - began_s
    return Run(
        arm=arm.name,
        kind=arm.kind,
        rate=rate,
        seed=seed,
        classes=classes,
        summary=summarize(classes, load.records, elapsed_s),
        records=load.records,
        shapes=shapes,
        kv_bytes=await kv_bytes(servers) - moved,
        held=None if isinstance(arm, TeachingArm) else await held(servers, before),
    )
