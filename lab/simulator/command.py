"""`twinpool lab simulate`: one cluster under a load, or every split of some GPUs."""

import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from lab.experiments.results import Setup
from lab.load.plan import TRACE_CLASS, Session, plan_sessions, replay, trace_work
from lab.load.summary import summarize
from lab.load.table import tables
from lab.load.work import WorkClass, WorkError, parse_work
from lab.output_file import why_unwritable
from lab.planner.capacity import Workload
from lab.planner.gpus import GPUS
from lab.planner.models import UnknownModel, find_model
from lab.planner.plan import Asked
from lab.planner.steps import EXPECTED
from lab.simulator.cluster import Incident, Rules, SimulatedCluster
from lab.simulator.costs import PlannedCosts, Pools
from lab.simulator.fitting.command import run_fitted
from lab.simulator.fitting.fit import FitError
from lab.simulator.plot import save_plot
from lab.simulator.sweep import Point, front, splits, sweep, with_limits_scaled
from lab.traces.formats import TraceError, read_trace
from lab.traces.trace import Scaling, TraceRequest, block_hit_rate, scale
from proxy.scheduling.slo import OverloadPolicy

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_PICTURES = (".png", ".svg", ".pdf")
DEFAULT_POOLS = "1x8+1x8"
_POOLS = re.compile(r"(\d+)x(\d+)\+(\d+)x(\d+)")
_INCIDENT = re.compile(r"(\+?)((?:prefill|decode)-\d+)@([\d.]+)")


class SimulateError(ValueError):
    """What was asked for makes no sense; a sentence."""


@dataclass(frozen=True)
class SimulateOptions:
    """The command line."""

    model: str
    gpu: str
    fit_run: Path | None
    """In place of model and GPU: a measured run."""
    arm: str
    replicas: int
    chunk_tokens: int
    remote_min_tokens: int
    pools: str
    sweep_gpus: int
    slo_factors: Sequence[float]
    """With a sweep: the front's splits are tried with limits so many times as long."""
    work: Sequence[str]
    trace: Path | None
    scaling: Scaling
    ttft_s: float | None
    itl_s: float | None
    seconds: float
    seed: int
    incidents: Sequence[str]
    on_overload: OverloadPolicy
    compute_efficiency: float
    memory_efficiency: float
    unbounded_caches: bool
    plot_file: Path | None
    json_file: Path | None


def run_simulate(options: SimulateOptions) -> int:
    """Returns the exit status."""
    errors = Console(stderr=True, highlight=False)
    try:
        _check_files(options)
        if options.fit_run is not None:
            return _fitted(options, options.fit_run)
        if not (options.model and options.gpu):
            raise SimulateError("give --model and --gpu, or a measured run with --fit")
        classes, sessions = _load(options)
        asked = _asked(options, classes, sessions)
        if options.sweep_gpus:
            return _sweep(options, asked, classes, sessions, errors)
        pools = parse_pools(options.pools or DEFAULT_POOLS)
        return _one(options, asked, pools, classes, sessions)
    except (SimulateError, UnknownModel, WorkError, TraceError, FitError) as error:
        errors.print(f"twinpool: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _check_files(options: SimulateOptions) -> None:
    """Before a sweep of minutes."""
    if options.slo_factors and not options.sweep_gpus:
        raise SimulateError("--slo-factor belongs to a sweep: give --sweep GPUS, or leave it out")
    if complaint := why_unwritable("--json", options.json_file):
        raise SimulateError(complaint)
    if options.unbounded_caches and (options.sweep_gpus or options.fit_run is not None):
        raise SimulateError("--unbounded-caches is for one cluster of --model and --gpu: leave --sweep and --fit out")
    file = options.plot_file
    if file is None:
        return
    if not options.sweep_gpus:
        raise SimulateError("--plot draws a sweep: give --sweep GPUS, or leave it out")
    if file.suffix not in _PICTURES or not file.parent.is_dir():
        raise SimulateError(f"--plot {file}: name a file in a directory that exists, ending in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SimulateError("--plot needs matplotlib: install twinpool with the extra `lab`")


def _fitted(options: SimulateOptions, run: Path) -> int:
    if options.sweep_gpus or options.incidents or options.model or options.gpu:
        raise SimulateError("--fit takes the costs of a measured run: leave --model, --gpu, --sweep and --incident out")
    if options.replicas and options.pools:
        raise SimulateError("give --pools or --replicas, not both")
    setup = None
    if options.replicas:
        setup = Setup(options.chunk_tokens, replicas=options.replicas)
    elif options.pools:
        pools = parse_pools(options.pools)
        setup = Setup(
            options.chunk_tokens,
            num_prefill=pools.num_prefill,
            num_decode=pools.num_decode,
            remote_min_tokens=options.remote_min_tokens,
        )
    classes, sessions = _load(options) if options.work or options.trace else ([], [])
    return run_fitted(run, options.arm, setup, classes, sessions, options.json_file)


def parse_pools(text: str) -> Pools:
    """`3x4+1x8`: three prefill workers of four ranks and one decode worker of eight."""
    match = _POOLS.fullmatch(text.replace(" ", ""))
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or min(numbers) < 1:
        raise SimulateError(f"{text!r} is no pair of pools; the form is 3x4+1x8: prefill workers x ranks + decode")
    return Pools(*numbers)


def parse_incident(text: str) -> Incident:
    """`decode-3@20`: it dies after 20 s; `+decode-3@40`: it comes (back)."""
    match = _INCIDENT.fullmatch(text)
    if match is None:
        raise SimulateError(f"{text!r} is no incident; the forms are decode-3@20 (dies) and +decode-3@40 (comes)")
    return Incident(float(match[3]), match[2], comes=bool(match[1]))


def _load(options: SimulateOptions) -> tuple[list[WorkClass], list[Session]]:
    if bool(options.work) == bool(options.trace):
        raise SimulateError("give classes of requests with --work, or a trace with --trace, and not both")
    if options.trace is None:
        classes = [parse_work(text) for text in options.work]
        if any(work.turns > 1 for work in classes):
            raise SimulateError("sessions of several turns cannot be simulated; leave turns= out")
        return classes, plan_sessions(classes, options.seconds, options.seed)
    trace = scale(read_trace(options.trace), options.scaling, options.seed)
    if not trace:
        raise SimulateError(f"nothing is left of the trace {options.trace}: keep more of it")
    work = trace_work(trace, options.ttft_s, options.itl_s)
    return [work], replay(trace, TRACE_CLASS, options.seed)


def _asked(options: SimulateOptions, classes: Sequence[WorkClass], sessions: Sequence[Session]) -> Asked:
    if not sessions:
        raise SimulateError("the load holds no request: make it longer or its rate higher")
    if options.gpu.lower() not in GPUS:
        raise SimulateError(f"{options.gpu} is unknown; there are {', '.join(GPUS)}")
    model = find_model(options.model)
    longest = max(
        sum(piece.num_tokens for piece in session.turns[0].pieces) + session.turns[0].output_tokens
        for session in sessions
    )
    if longest > model.context:
        raise SimulateError(
            f"a request has {longest} tokens, the context of {model.name} is {model.context}; leave such requests out "
            "(--max-prompt) or scale them (--lengths)"
        )
    reached = replace(EXPECTED, compute=options.compute_efficiency, memory=options.memory_efficiency)
    work = Workload(longest, 1, classes[0].ttft_s or 1e6, classes[0].itl_s or 1e6)
    return Asked(model, GPUS[options.gpu.lower()], options.sweep_gpus, work, model.weight_bytes, efficiency=reached)


def _one(
    options: SimulateOptions,
    asked: Asked,
    pools: Pools,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
) -> int:
    costs = PlannedCosts(asked, pools)
    rules = Rules(options.on_overload, bounded_caches=not options.unbounded_caches)
    cluster = SimulatedCluster(costs, pools.num_prefill, pools.num_decode, rules, classes)
    if not cluster.fits(asked.work.prompt_tokens):
        raise SimulateError(
            f"{asked.model.name} on {pools.prefill_tp} and {pools.decode_tp} x {asked.gpu.name} leaves no room for a "
            f"request of {asked.work.prompt_tokens} tokens; give the workers more ranks"
        )
    began_s = time.monotonic()
    outcome = cluster.run(sessions, [parse_incident(text) for text in options.incidents])
    took_s = time.monotonic() - began_s
    summary = summarize(classes, outcome.records, outcome.seconds)
    out = Console(highlight=False)
    out.print(f"Simulated: {asked.model.name} on {pools.num_gpus} x {asked.gpu.name}, {_name(pools)}")
    out.print(tables(summary))
    out.print(
        f"Prefill workers computed {100 * outcome.prefill_use:.0f} % of the time, decode workers "
        f"{100 * outcome.decode_use:.0f} %, {outcome.mean_batch:.1f} sequences at once; {outcome.continued} streams "
        f"went on at other workers. {outcome.seconds:.0f} s of the cluster took {took_s:.1f} s here.",
        soft_wrap=True,
    )
    if outcome.found_cached:
        out.print(
            f"{100 * outcome.found_cached:.1f} % of the prompts' full blocks were cached where they were prefilled; "
            f"one cache without bounds would have had {100 * _ceiling(sessions):.1f} %.",
            soft_wrap=True,
        )
    if options.json_file is not None:
        options.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return 0 if summary.total.whole else _EXIT_FAILED


def _ceiling(sessions: Sequence[Session]) -> float:
    """Of all full blocks, those that an earlier prompt had."""
    blocks = (tuple(piece.seed for piece in session.turns[0].pieces[:-1]) for session in sessions)
    return block_hit_rate([TraceRequest(0.0, 1, 1, block_ids) for block_ids in blocks])


def _sweep(
    options: SimulateOptions,
    asked: Asked,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
    errors: Console,
) -> int:
    candidates = list(splits(asked))
    if not candidates:
        raise SimulateError(f"{asked.model.name} does not fit twice on {asked.num_gpus} x {asked.gpu.name}")
    with errors.status("") as status:
        points = sweep(
            asked, candidates, Rules(options.on_overload), classes, sessions,
            lambda point: status.update(f"{len(candidates)} splits; {_name(point.pools)} done"),
        )  # fmt: skip
    factors = sorted(set(options.slo_factors))
    chosen = [point.pools for point in front(points)] if factors else []
    scaled = with_limits_scaled(asked, chosen, Rules(options.on_overload), classes, sessions, factors)
    best = set(map(id, front(points)))
    table = Table(
        "prefill + decode", "within both", "TTFT p90, s", "gap p99, ms", "prefill use", "decode use", "", box=None
    )
    for point in sorted(points, key=lambda p: -p.attained)[:25]:
        table.add_row(
            _name(point.pools), f"{100 * point.attained:.1f} %", f"{point.ttft_s:.2f}", f"{point.itl_s * 1000:.0f}",
            f"{100 * point.prefill_use:.0f} %", f"{100 * point.decode_use:.0f} %",
            "front" if id(point) in best else "",
        )  # fmt: skip
    out = Console(highlight=False)
    out.print(f"Simulated: {asked.model.name} on {asked.num_gpus} x {asked.gpu.name}, {len(points)} splits")
    out.print(table)
    if scaled:
        shown = Table("limits times", *(f"{factor:g}" for factor in factors), box=None)
        for pools, shares in scaled.items():
            shown.add_row(_name(pools), *(f"{100 * share:.1f} %" for share in shares))
        out.print(shown)
    if options.plot_file is not None:
        title = f"{asked.model.name} on {asked.num_gpus} x {asked.gpu.name}"
        limits = (classes[0].ttft_s, classes[0].itl_s) if len(classes) == 1 else (None, None)
        save_plot(points, title, options.plot_file, limits, factors, scaled)
    if options.json_file is not None:
        options.json_file.write_bytes(
            msgspec.json.format(msgspec.json.encode(_numbers(points, factors, scaled)), indent=2) + b"\n"
        )
    return 0


def _name(pools: Pools) -> str:
    return f"{pools.num_prefill}x{pools.prefill_tp}+{pools.num_decode}x{pools.decode_tp}"


def _numbers(
    points: Sequence[Point], factors: Sequence[float], scaled: Mapping[Pools, Sequence[float]]
) -> list[dict[str, object]]:
    return [
        {
            "pools": _name(point.pools),
            "attained": point.attained,
            "ttft_p90_s": point.ttft_s,
            "itl_p99_s": point.itl_s,
            "prefill_use": point.prefill_use,
            "decode_use": point.decode_use,
            "attained_with_limits_times": dict(zip(map(str, factors), scaled.get(point.pools, ()), strict=False)),
        }
        for point in points
    ]
