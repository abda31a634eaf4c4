"""What the simulator says of a load, with fitted costs, beside what was measured of it."""

from collections.abc import Sequence

from lab.experiments.prediction import Prediction
from lab.experiments.results import Results, Run, Setup
from lab.load.client import Record
from lab.load.plan import Piece, Session, Turn
from lab.load.summary import summarize
from lab.load.work import WorkClass
from lab.simulator.cluster import Rules, SimulatedCluster
from lab.simulator.costs import FittedCosts
from lab.simulator.fitting.fit import FitError, fit_costs
from lab.simulator.replicas import serve_side_by_side


def sessions_of(records: Sequence[Record]) -> list[Session]:
    """The same requests at the same times."""
    return [
        Session(r.sent_s, r.work, r.session, (Turn((Piece(0, r.prompt_tokens),), r.output_tokens),))
        for r in sorted(records, key=lambda record: record.sent_s)
    ]


def simulate(
    costs: FittedCosts, setup: Setup, classes: Sequence[WorkClass], sessions: Sequence[Session]
) -> list[Record]:
    """What clients would see."""
    if setup.replicas:
        return serve_side_by_side(sessions, costs, setup.replicas, setup.chunk_tokens)
    rules = Rules(
        on_overload="demote",
        remote_prefill_min_tokens=setup.remote_min_tokens,
        chunk_tokens=setup.chunk_tokens,
        local_chunk_tokens=setup.chunk_tokens,
    )
    return SimulatedCluster(costs, setup.num_prefill, setup.num_decode, rules, classes).run(sessions).records


def predict(costs: FittedCosts, run: Run, setup: Setup, *, fitted_on: bool) -> list[Prediction]:
    """Of each kind of request, and of all together. `fitted_on`: it is the run that the costs were fitted to."""
    simulated = simulate(costs, setup, run.classes, sessions_of(run.records))
    ours, theirs = summarize(run.classes, simulated, run.summary.seconds), run.summary
    pairs = list(zip(theirs.classes, ours.classes, strict=True))
    return [
        Prediction(
            run.arm,
            run.rate,
            run.seed,
            was.name,
            fitted_on,
            (was.ttft_s.p50, said.ttft_s.p50),
            (was.itl_s.p50, said.itl_s.p50),
            (was.attained, said.attained),
        )
        for was, said in ([*pairs, (theirs.total, ours.total)] if len(pairs) > 1 else pairs)
    ]


def predictions(results: Results) -> tuple[list[Prediction], dict[str, str]]:
    """Of every arm that has engines and more than one run: fitted to its first run, asked of all. And why not."""
    found: list[Prediction] = []
    why_not: dict[str, str] = {}
    for arm in results.arms:
        first, *others = results.of(arm)
        if first.setup is None or not others:
            continue
        try:
            costs = fit_costs(first.records, first.setup)
        except FitError as error:
            why_not[arm] = str(error)
            continue
        for run in (first, *others):
            found += predict(costs, run, first.setup, fitted_on=run is first)
    return found, why_not
