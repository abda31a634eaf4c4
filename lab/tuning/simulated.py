"""What settings move under load, simulated: the proxy's scheduler, workers as the planner has them. Deterministic."""

from collections.abc import Sequence

from lab.load.plan import TRACE_CLASS, Session, plan_sessions, replay
from lab.load.summary import ClassSummary, Summary, summarize
from lab.load.work import WorkClass, parse_work
from lab.planner.capacity import Workload
from lab.planner.plan import Asked
from lab.simulator.cluster import Outcome, Rules, SimulatedCluster
from lab.simulator.costs import PlannedCosts, Pools
from lab.traces.trace import TraceRequest
from lab.tuning.arithmetic import GPU, SMALL
from lab.tuning.markdown import ms, percent, table

POOLS = Pools(1, 1, 1, 1)
SECONDS = 40
_BLOCK = 512


def _run(
    work: Sequence[str], sessions: Sequence[Session] = (), rules: Rules = Rules(), memory_share: float = 0.9
) -> tuple[Outcome, Summary]:
    classes: list[WorkClass] = [parse_work(text) for text in work]
    asked = Asked(SMALL, GPU, POOLS.num_gpus, Workload(1, 1, 1, 1))
    costs = PlannedCosts(asked, POOLS, memory_share=memory_share)
    cluster = SimulatedCluster(costs, POOLS.num_prefill, POOLS.num_decode, rules, classes)
    outcome = cluster.run(sessions or plan_sessions(classes, SECONDS, 1))
    return outcome, summarize(classes, outcome.records, outcome.seconds)


def memory_share() -> str:
    """`gpu_memory_utilization`: streams wait for room, or do not."""
    rows = []
    for share in (0.3, 0.4, 0.6, 0.9):
        outcome, summary = _run(["doc=4/s,6000+400,ttft=2,itl=0.05"], memory_share=share)
        rows.append([f"{share:g}", *_pair(summary.total), f"{outcome.mean_batch:.1f}", percent(summary.total.attained)])
    heads = (
        "gpu_memory_utilization",
        "TTFT p50 / p99, ms",
        "gap p50 / p99, ms",
        "streams at once",
        "within 2 s and 50 ms",
    )
    return table(heads, rows)


def chunks() -> str:
    """`max_num_batched_tokens` and chunked prefill: short prompts beside long ones at one prefill worker."""
    rows = []
    work = ["chat=4/s,600+40,ttft=0.5,itl=0.05", "doc=0.35/s,30000+40,ttft=8,itl=0.05"]
    for chunk in (512, 2048, 8192, 32_768):
        outcome, summary = _run(work, rules=Rules(chunk_tokens=chunk))
        chat, doc = summary.classes
        name = f"{chunk:,}" if chunk < 30_000 else "whole prompts"
        rows.append(
            [name, _pair(chat)[0], _pair(doc)[0], percent(outcome.prefill_use), percent(summary.total.attained)]
        )
    heads = ("tokens per step", "chat: TTFT p50 / p99, ms", "doc: TTFT p50 / p99, ms", "P computes", "within limits")
    return table(heads, rows)


def cached_prefix() -> str:
    """`enable_prefix_caching`: prompts that begin alike."""
    rows = []
    work = [f"{TRACE_CLASS}=4/s,6144+40,ttft=1,itl=0.05"]
    blocks = 6144 // _BLOCK
    for shared in (0, 6, 9, 11):
        own = blocks - shared
        trace = [
            TraceRequest(0.25 * number, blocks * _BLOCK, 40, (*range(shared), *_own(number, own)), _BLOCK)
            for number in range(4 * SECONDS)
        ]
        outcome, summary = _run(work, replay(trace, TRACE_CLASS, 1))
        share = percent(shared / blocks)
        rows.append([share, *_pair(summary.total)[:1], percent(outcome.prefill_use)])
    return table(("of each prompt shared", "TTFT p50 / p99, ms", "P computes"), rows)


def _own(number: int, blocks: int) -> range:
    """Ids of blocks that only this prompt has."""
    return range(1000 * (number + 1), 1000 * (number + 1) + blocks)


def _pair(row: ClassSummary) -> tuple[str, str]:
    """TTFT, and gaps."""
    return f"{ms(row.ttft_s.p50)} / {ms(row.ttft_s.p99)}", f"{ms(row.itl_s.p50)} / {ms(row.itl_s.p99)}"
