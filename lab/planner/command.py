"""`twinpool plan`: reads what is asked for, prints the plan."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from lab.output_file import why_unwritable
from lab.planner.capacity import Workload
from lab.planner.gpus import GPUS
from lab.planner.models import UnknownModel, find_model
from lab.planner.plan import Asked, NothingFits, Plan, fewest_gpus, make_plan
from lab.planner.steps import EXPECTED

_EXIT_FAILED, _EXIT_USAGE = 1, 2

WORKLOADS = {
    # Prompt and output tokens: means of the public traces of that kind, rounded.
    "chat": (1200, 250),
    "code": (2000, 30),
    "summary": (8000, 300),
    "long": (64_000, 500),
}


class PlanError(ValueError):
    """What was asked for makes no sense; a sentence."""


@dataclass(frozen=True)
class PlanOptions:
    """The command line."""

    model: str
    gpu: str
    num_gpus: int
    """0: as many as the workload's rate needs."""
    workload: str
    ttft_s: float
    itl_s: float
    attained: float
    dtype: str
    kv_dtype: str
    compute_efficiency: float
    memory_efficiency: float
    usd_per_hour: float
    json_file: Path | None


def run_plan(options: PlanOptions) -> int:
    """Returns the exit status: 1 when nothing fits."""
    errors = Console(stderr=True, highlight=False)
    try:
        asked, rate = _asked(options)
        if complaint := why_unwritable("--json", options.json_file):
            raise PlanError(complaint)
    except (PlanError, UnknownModel) as error:
        errors.print(f"twinpool: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_USAGE
    try:
        plan = make_plan(asked) if options.num_gpus else fewest_gpus(asked, rate)
    except NothingFits as error:
        errors.print(f"twinpool: {asked.model.name} does not fit: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_FAILED
    if plan is None:
        errors.print(f"twinpool: no number of {asked.gpu.name} up to 1,024 carries {rate:g} requests/s", style="red")
        return _EXIT_FAILED
    Console(highlight=False).print(_show(plan, rate))
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(_numbers(plan), indent=2) + "\n")
    return 0


def _asked(options: PlanOptions) -> tuple[Asked, float]:
    prompt, output, rate = parse_workload(options.workload)
    if not options.num_gpus and not rate:
        raise PlanError("give --gpus, or a rate in the workload (rate=10), so that the number of GPUs can be found")
    if options.gpu.lower() not in GPUS:
        raise PlanError(f"{options.gpu} is unknown; there are {', '.join(GPUS)}")
    gpu = GPUS[options.gpu.lower()]
    if options.usd_per_hour:
        gpu = replace(gpu, usd_per_hour=options.usd_per_hour)
    model = find_model(options.model)
    if prompt + output > model.context:
        raise PlanError(f"{prompt} + {output} tokens exceed the context of {model.name}, {model.context} tokens")
    work = Workload(prompt, output, options.ttft_s, options.itl_s, options.attained)
    weight_bytes = {"auto": model.weight_bytes, "bf16": 2.0, "fp8": 1.0}[options.dtype]
    kv_bytes = {"bf16": 2.0, "fp8": 1.0}[options.kv_dtype]
    reached = replace(EXPECTED, compute=options.compute_efficiency, memory=options.memory_efficiency)
    return Asked(model, gpu, options.num_gpus, work, weight_bytes, kv_bytes, reached), rate


def parse_workload(text: str) -> tuple[int, int, float]:
    """(prompt tokens, output tokens, requests per second or 0) of `chat` or `prompt=2000,output=300,rate=5`."""
    name, *more = text.split(",")
    values: dict[str, float] = {}
    if name in WORKLOADS:
        values["prompt"], values["output"] = WORKLOADS[name]
    else:
        more = text.split(",")
    for part in more:
        key, _, value = part.partition("=")
        if key not in ("prompt", "output", "rate"):
            known = f"{', '.join(WORKLOADS)}, or prompt=TOKENS,output=TOKENS[,rate=PER_SECOND]"
            raise PlanError(f"{part!r} in the workload {text!r} is unknown; there are {known}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise PlanError(f"{value!r} in the workload {text!r} is no number") from error
    if min(values.get("prompt", 0), values.get("output", 0)) < 1 or values.get("rate", 0) < 0:
        raise PlanError(f"the workload {text!r} needs at least one token of prompt and of output")
    return int(values["prompt"]), int(values["output"]), values.get("rate", 0.0)


def _show(plan: Plan, rate: float) -> Group:
    asked, work = plan.asked, plan.asked.work
    model, gpu = asked.model, asked.gpu
    kv = model.kv_bytes_per_token(asked.kv_bytes)
    weights = model.bytes_of_weights(asked.weight_bytes)
    facts = [
        f"{model.name}: {model.weights / 1e9:.1f} billion weights, {weights / 1e9:.0f} GB"
        + (f", {model.active_weights / 1e9:.1f} billion per token" if model.experts else "")
        + f"; KV {kv / 1024:.1f} KiB per token, {kv * work.prompt_tokens / 1e9:.2f} GB per prompt",
        f"{asked.num_gpus} x {gpu.name}; {work.prompt_tokens} + {work.output_tokens} tokens",
        f"TTFT <= {work.ttft_s:g} s and gaps <= {work.itl_s * 1000:g} ms for {100 * work.attained:g} % of requests",
    ]
    table = Table("TP", "KV tokens", "prefill", "(bound)", "decode step", "(bound)", box=None)
    rates = Table("TP", "requests/s of a prefill worker", "a decode worker", "a colocated worker", box=None)
    notes: list[str] = []
    for r in plan.ranks:
        if not r.kv_tokens:
            notes.append(f"TP {r.tensor_parallel}: {r.decode.why_not}")
            continue
        table.add_row(
            str(r.tensor_parallel), f"{r.kv_tokens:,}", f"{r.prefill_s * 1000:.0f} ms",
            f"{r.prefill_bound_s * 1000:.0f} ms", f"{r.decode_s * 1000:.1f} ms", f"{r.decode_bound_s * 1000:.1f} ms",
        )  # fmt: skip
        capacities = {"prefill": r.prefill, "decode": r.decode, "colocated": r.colocated}
        rates.add_row(str(r.tensor_parallel), *(f"{c.rate_per_s:.2f}" for c in capacities.values()))
        notes += [f"TP {r.tensor_parallel}, {name}: {c.why_not}" for name, c in capacities.items() if c.why_not]
    where = "within a machine" if plan.transfer_same_machine else "between machines"
    lines: list[str] = []
    if plan.rate_per_s:
        pools = f"{plan.num_prefill} prefill x TP {plan.prefill_tp} + {plan.num_decode} decode x TP {plan.decode_tp}"
        lines.append(f"Separated: {pools}: {plan.rate_per_s:.2f} requests/s{_cost(plan.usd_per_million_tokens)}")
        lines.append(f"  KV of a prompt: {plan.transfer_s * 1000:.1f} ms {where}, most of it during the prefill")
    if plan.colocated_rate_per_s:
        lines.append(
            f"Colocated: {plan.num_colocated} x TP {plan.colocated_tp}: {plan.colocated_rate_per_s:.2f} requests/s"
            f"{_cost(plan.colocated_usd_per_million_tokens)}"
        )
    if rate:
        lines.append(f"Asked for: {rate:g} requests/s")
    lines += [
        plan.verdict,
        "Estimates from data sheets and assumed efficiencies: measure before you buy (twinpool lab load).",
    ]
    return Group(*facts, "", table, "", rates, *notes, "", *lines)


def _cost(usd: float | None) -> str:
    return f", ${usd:.2f} per million output tokens" if usd is not None else ""


def _numbers(plan: Plan) -> dict[str, Any]:
    def worker(num: int, tensor_parallel: int) -> dict[str, int]:
        return {"replicas": num, "tensor_parallel": tensor_parallel}

    rows: Sequence[dict[str, Any]] = [
        {
            "tensor_parallel": r.tensor_parallel,
            "kv_tokens": r.kv_tokens,
            "prefill_s": r.prefill_s,
            "prefill_bound_s": r.prefill_bound_s,
            "decode_step_s": r.decode_s,
            "decode_step_bound_s": r.decode_bound_s,
            "prefill_per_s": r.prefill.rate_per_s,
            "decode_per_s": r.decode.rate_per_s,
            "colocated_per_s": r.colocated.rate_per_s,
        }
        for r in plan.ranks
    ]
    return {
        "num_gpus": plan.asked.num_gpus,
        "kv_bytes_per_token": plan.asked.model.kv_bytes_per_token(plan.asked.kv_bytes),
        "pools": {
            "prefill": worker(plan.num_prefill, plan.prefill_tp),
            "decode": worker(plan.num_decode, plan.decode_tp),
        },
        "requests_per_s": plan.rate_per_s,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "transfer_s": plan.transfer_s,
        "colocated": {**worker(plan.num_colocated, plan.colocated_tp), "requests_per_s": plan.colocated_rate_per_s},
        "ratio": plan.ratio,
        "verdict": plan.verdict,
        "ranks": rows,
    }
