"""Costs of engine steps from what clients saw: least squares over gaps and times to first token. Pure.

A step takes `base + token * prompt tokens + pair * pairs of them + sequence * decodes + kv * their KV tokens`.

* A gap during which no prompt was computed beside it is one step over the streams of that moment.
* The time to first token of a request that met no other prompt is that of its chunks, each with the streams that went
  on beside it, and what a client waits besides.
* The gap from the first to the second token of a separated pair is one step and the hand-over.
"""

from collections.abc import Sequence

import numpy as np

from lab.experiments.results import Setup
from lab.load.client import Record
from lab.simulator.costs import FittedCosts, FittedSteps
from lab.simulator.fitting.timeline import Floats, Timeline, token_times

_BASE, _TOKEN, _PAIR, _SEQUENCE, _KV, _BESIDE = range(6)
_LEAST_PROMPTS = 8
_LEAST_GAPS = 100
_ROUNDS = 4
_OUTLIER = 4.0
"""Rows whose residual is so many times the usual one are left out: a machine does other things now and then."""
_LEAST_OUTLIER = 0.02


class FitError(ValueError):
    """A run that tells too little; a sentence."""


def fit_costs(records: Sequence[Record], setup: Setup) -> FittedCosts:
    """Raises `FitError`."""
    whole = [record for record in records if record.ttft_s is not None and not record.error]
    servers: dict[int, list[Record]] = {}
    for record in records:
        servers.setdefault(_server(record, setup), []).append(record)
    timelines = {server: Timeline(mine) for server, mine in servers.items()}
    prompts = [_prompt_row(record, timelines[_server(record, setup)], setup) for record in whole]
    alone = [row for row, others in prompts if others < max(1, setup.num_prefill)]
    gaps = [row for record in whole for row in _gap_rows(record, timelines, setup)]
    if len(alone) < _LEAST_PROMPTS:
        raise FitError(
            f"only {len(alone)} of {len(records)} requests met no other prompt, too few to tell what one takes; "
            "measure at a lower rate, or for longer"
        )
    if len(gaps) < _LEAST_GAPS:
        raise FitError(f"only {len(gaps)} gaps between tokens had no prompt beside them; measure at a lower rate")
    parts = _solve(np.array([*gaps, *alone]))
    base_s, token_s, pair_s, sequence_s, kv_token_s = map(float, parts[:_BESIDE])
    engine = FittedSteps(base_s, token_s, pair_s, sequence_s, kv_token_s)
    handover_s = 0.0 if setup.replicas else _handover_s(whole, timelines[0], setup, engine)
    return FittedCosts(engine, float(parts[_BESIDE]), handover_s)


def _server(record: Record, setup: Setup) -> int:
    """Sessions go round robin over replicas; which workers a cluster chose is not known."""
    return record.session % setup.replicas if setup.replicas else 0


def _prompt_row(record: Record, timeline: Timeline, setup: Setup) -> tuple[list[float], float]:
    """(parts of the time to first token, then the time itself; how many other prompts were about)."""
    from_s, to_s = record.sent_s, record.sent_s + (record.ttft_s or 0.0)
    others = float(timeline.prefills(np.array([from_s]), np.array([to_s]))[0]) - 1
    steps = float(-(-record.prompt_tokens // setup.chunk_tokens))
    decodes = kv_tokens = 0.0
    if _is_local(record, setup):
        at_s = np.linspace(from_s, to_s, 16)[:-1]
        share = 1 / max(1, setup.num_decode)
        decodes = float(timeline.decoding(at_s).mean()) * share
        kv_tokens = float(timeline.kv_tokens(at_s).mean()) * share
        steps += 0.5 * min(1.0, decodes)  # it comes in the middle of a step of the others
    tokens = float(record.prompt_tokens)
    return [steps, tokens, tokens**2 / 2, steps * decodes, steps * kv_tokens, 1.0, record.ttft_s or 0.0], others


def _gap_rows(record: Record, timelines: dict[int, Timeline], setup: Setup) -> list[list[float]]:
    """Parts of each gap, then the gap itself."""
    timeline = timelines[_server(record, setup)]
    times = token_times(record)
    # The first gap of a pair holds the hand-over.
    times = times[1:] if not setup.replicas else times
    if len(times) < 2:
        return []
    from_s, to_s = times[:-1], times[1:]
    middle_s = (from_s + to_s) / 2
    undisturbed = np.ones(len(middle_s), dtype=bool)
    if setup.replicas:
        undisturbed = timeline.prefills(from_s, to_s) == 0
    share = 1 / max(1, setup.num_decode)
    decodes = np.maximum(1.0, timeline.decoding(middle_s) * share)
    kv_tokens = timeline.kv_tokens(middle_s) * share
    ones, zeros = np.ones_like(decodes), np.zeros_like(decodes)
    rows = np.column_stack([ones, zeros, zeros, decodes, kv_tokens, zeros, to_s - from_s])
    return [row.tolist() for row in rows[undisturbed]]


def _is_local(record: Record, setup: Setup) -> bool:
    """Its prompt is computed beside streams."""
    return bool(setup.replicas) or record.prompt_tokens < setup.remote_min_tokens


def _handover_s(whole: Sequence[Record], timeline: Timeline, setup: Setup, engine: FittedSteps) -> float:
    """Median over requests that were handed over; not below 0."""
    found = []
    for record in whole:
        if record.gaps_s and not _is_local(record, setup):
            at_s = np.array([record.sent_s + (record.ttft_s or 0.0) + record.gaps_s[0]])
            share = 1 / max(1, setup.num_decode)
            decodes = max(1.0, float(timeline.decoding(at_s)[0]) * share)
            step_s = engine.step_s(decodes, float(timeline.kv_tokens(at_s)[0]) * share / decodes)
            # Others' steps do not wait for it: it joins in the middle of one.
            found.append(record.gaps_s[0] - step_s * (1.5 if decodes > 1 else 1.0))
    return max(0.0, float(np.median(found))) if found else 0.0


def _solve(rows: Floats) -> Floats:
    """Parts that explain the last column best. Relative errors count; what fits nothing else is left out."""
    kept = np.ones(len(rows), dtype=bool)
    usual = np.where(rows[:, _BESIDE] > 0, rows[:, -1], np.median(rows[rows[:, _BESIDE] == 0, -1]))
    scaled = rows / usual[:, None]
    parts = np.zeros(_BESIDE + 1)
    for _ in range(_ROUNDS):
        parts = _non_negative(scaled[kept, :-1], scaled[kept, -1])
        residuals = np.abs(scaled[:, :-1] @ parts - scaled[:, -1])
        limit = max(_LEAST_OUTLIER, _OUTLIER * float(np.median(residuals)))
        kept = residuals <= limit
    return parts


def _non_negative(matrix: Floats, wanted: Floats) -> Floats:
    """Least squares; parts that would be negative are dropped one by one. `matrix` is [rows, parts]."""
    sizes = np.abs(matrix).max(axis=0)
    free = [part for part in range(matrix.shape[1]) if sizes[part] > 0]
    solution = np.zeros(matrix.shape[1])
    while free:
        found = np.linalg.lstsq(matrix[:, free] / sizes[free], wanted, rcond=1e-6)[0]
        lowest = int(np.argmin(found))
        if found[lowest] >= 0:
            solution[free] = found / sizes[free]
            break
        del free[lowest]
    return solution
