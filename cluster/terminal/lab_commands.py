"""`twinpool plan` and `twinpool lab`. What they do lies in `lab`, which this room may not import: docs/decisions.md."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

LINKS_ENTRY = "lab.links.command:run_links"
LOAD_ENTRY = "lab.load.command:run_load"
LOAD_OPTIONS = "lab.load.command:LoadOptions"
SCALING = "lab.traces.trace:Scaling"
RUN_ENTRY = "lab.experiments.command:run_lab"
SIMULATE_ENTRY = "lab.simulator.command:run_simulate"
SIMULATE_OPTIONS = "lab.simulator.command:SimulateOptions"
TUNE_ENTRY = "lab.tuning.command:run_tune"
PLAN_ENTRY = "lab.planner.command:run_plan"
PLAN_OPTIONS = "lab.planner.command:PlanOptions"

lab_app = typer.Typer(no_args_is_help=True, help="Measure this machine, and servers.")

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")]
# What `load` and `simulate` both take.
Speed = Annotated[float, typer.Option(min=0.001, help="Trace: 2 replays it in half of the time.")]
Share = Annotated[float, typer.Option(min=0.0001, max=1, help="Trace: of its requests, so many are sent.")]
Lengths = Annotated[float, typer.Option(min=0.001, help="Trace: factor on prompts, blocks and outputs.")]
MaxPrompt = Annotated[int, typer.Option(min=0, help="Trace: leave longer prompts out. 0: none.")]
TraceTtft = Annotated[float | None, typer.Option(help="Trace: limit on the time to first token, in seconds.")]
TraceItl = Annotated[float | None, typer.Option(help="Trace: limit on the gaps between tokens, in seconds.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed is the same work.")]


@lab_app.command("links")
def lab_links(
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a minute with small caches, instead of up to three minutes.")
    ] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw them there: a .png, .svg or .pdf.")
    ] = None,
    large_gib: Annotated[
        float, typer.Option(min=0.01, max=64, help="Size of the transfer that one block has to pass.")
    ] = 0.5,
) -> None:
    """Measure every link this machine can run, beside memcpy and other libraries (at most 2 GiB of memory)."""
    sys.exit(_load(LINKS_ENTRY)(quick=quick, large_gib=large_gib, json_file=json_file, plot_file=plot_file))


@lab_app.command("load")
def lab_load(
    url: Annotated[str, typer.Argument(help="Address of any OpenAI-compatible server.")],
    work: Annotated[
        list[str] | None,
        typer.Option(
            "--work",
            "-w",
            metavar="CLASS",
            help="NAME=RATE/s,PROMPT+OUTPUT in tokens, then ttft= and itl= (limits in seconds), turns= and think= "
            "(sessions of several turns), shared= (tokens that all sessions begin with). May be given several times: "
            "chat=0.5/s,128+64,ttft=3,itl=0.1",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of --work: a trace of Azure, Mooncake or BurstGPT, replayed."),
    ] = None,
    speed: Speed = 1.0,
    share: Share = 1.0,
    lengths: Lengths = 1.0,
    max_prompt: MaxPrompt = 0,
    ttft: TraceTtft = None,
    itl: TraceItl = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long sessions begin, or the part of a trace.")] = 60.0,
    seed: Seed = 1,
    process: Annotated[
        Literal["poisson", "gamma", "even"], typer.Option(help="How sessions arrive; gamma comes in bursts.")
    ] = "poisson",
    cv: Annotated[float, typer.Option(min=0.05, help="Gamma: standard deviation of the gaps, by their mean.")] = 2.0,
    model: Annotated[str, typer.Option(help="Empty: the first one the server names.")] = "",
    api_key: Annotated[str, typer.Option(help="Of the server.", envvar="TWINPOOL_API_KEY")] = "none",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a directory with one. Otherwise the server is asked.")
    ] = None,
    class_header: Annotated[
        str, typer.Option(help="Header that tells the server a request's class, e.g. X-Slo-Class. Empty: none.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="A request without an end by then has failed.")] = 300.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Send nothing that only some servers know (ignore_eos, return_token_ids).")
    ] = False,
    jsonl_file: Annotated[
        Path | None, typer.Option("--jsonl", metavar="FILE", help="Write every request there, a line each.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Send open-loop load to a server and measure TTFT, every gap between tokens, and how many met their limits."""
    scaling = _load(SCALING)(speed=speed, share=share, lengths=lengths, seconds=seconds, max_prompt_tokens=max_prompt)
    options = _load(LOAD_OPTIONS)(
        url=url, work=work or [], trace=trace, scaling=scaling, ttft_s=ttft, itl_s=itl, seconds=seconds, seed=seed,
        process=process, cv=cv, model=model, api_key=api_key, tokenizer=tokenizer, class_header=class_header,
        timeout_s=timeout_s, plain=plain, jsonl_file=jsonl_file, json_file=json_file,
    )  # fmt: skip
    sys.exit(_load(LOAD_ENTRY)(options))


@lab_app.command("run")
def lab_run(
    experiment: Annotated[
        str,
        typer.Argument(
            help="slo-separation, goodput, ladder, chunk-size, pd-ratio, reserve-policy, prediction, tuning, or a file."
        ),
    ],
    directory: Annotated[
        Path | None, typer.Option("--out", metavar="DIRECTORY", help="For report.html, runs.csv and logs.")
    ] = None,
) -> None:
    """Serve the same load in several ways, one after the other, and write a report that compares them."""
    sys.exit(_load(RUN_ENTRY)(name=experiment, directory=directory))


@lab_app.command("simulate")
def lab_simulate(
    model: Annotated[str, typer.Option(help="As for `twinpool plan`.")] = "",
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200 or l40s.")] = "",
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="In place of --model and --gpu: costs fitted to what was measured, an experiment's directory or the "
            "--jsonl of `twinpool lab load`. Without a load: how well they foretell what was measured.",
        ),
    ] = None,
    arm: Annotated[str, typer.Option(help="Fit: of the experiment's arms, this one.")] = "",
    replicas: Annotated[int, typer.Option(min=0, help="Fit: so many plain servers, in place of --pools.")] = 0,
    chunk: Annotated[int, typer.Option(min=1, help="Fit: prompt tokens of a step, with --pools or --replicas.")] = 512,
    remote_min: Annotated[int, typer.Option(min=0, help="Fit: shorter prompts are computed by decode workers.")] = 64,
    pools: Annotated[
        str, typer.Option(help="Prefill workers x ranks + decode workers x ranks; 1x8+1x8 unless given.")
    ] = "",
    sweep_gpus: Annotated[
        int, typer.Option("--sweep", min=0, help="In place of --pools: every way to split so many GPUs.")
    ] = 0,
    slo_factor: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            metavar="FACTOR",
            help="Sweep: what is left if both limits are so many times as long. May be given several times.",
        ),
    ] = None,
    work: Annotated[
        list[str] | None, typer.Option("--work", "-w", metavar="CLASS", help="As for `twinpool lab load`.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="As for `twinpool lab load`.")] = None,
    speed: Speed = 1.0,
    share: Share = 1.0,
    lengths: Lengths = 1.0,
    max_prompt: MaxPrompt = 0,
    ttft: TraceTtft = None,
    itl: TraceItl = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long requests come, in simulated time.")] = 120.0,
    seed: Seed = 1,
    incident: Annotated[
        list[str] | None, typer.Option(help="decode-3@20: that worker dies after 20 s; +decode-3@40: it comes (back).")
    ] = None,
    on_overload: Annotated[
        Literal["queue", "demote", "reject"], typer.Option(help="What becomes of requests that cannot be in time.")
    ] = "queue",
    compute_efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="As for `twinpool plan`.")] = 0.55,
    memory_efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="As for `twinpool plan`.")] = 0.75,
    unbounded_caches: Annotated[
        bool, typer.Option("--unbounded-caches", help="Prefill workers forget no prompt; not with a sweep or --fit.")
    ] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a sweep there: a .png, .svg or .pdf.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run the proxy's real scheduler against workers that exist only as time: any model, any number of GPUs."""
    scaling = _load(SCALING)(speed=speed, share=share, lengths=lengths, seconds=seconds, max_prompt_tokens=max_prompt)
    options = _load(SIMULATE_OPTIONS)(
        model=model, gpu=gpu, fit_run=fit, arm=arm, replicas=replicas, chunk_tokens=chunk,
        remote_min_tokens=remote_min, pools=pools, sweep_gpus=sweep_gpus,
        slo_factors=slo_factor or [], work=work or [], trace=trace, scaling=scaling,
        ttft_s=ttft, itl_s=itl, seconds=seconds, seed=seed, incidents=incident or [], on_overload=on_overload,
        compute_efficiency=compute_efficiency, memory_efficiency=memory_efficiency, plot_file=plot_file,
        unbounded_caches=unbounded_caches,
        json_file=json_file,
    )  # fmt: skip
    sys.exit(_load(SIMULATE_ENTRY)(options))


@lab_app.command("tune")
def lab_tune(
    run: Annotated[
        Path | None,
        typer.Argument(help="Directory of `twinpool lab run tuning`. Without it the measured table of --out stays."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The guide.")] = Path("tuning.md"),
) -> None:
    """Write the guide on engine settings: what each moves, computed, simulated and measured."""
    sys.exit(_load(TUNE_ENTRY)(run, out))


def plan_command(
    model: Annotated[
        str,
        typer.Option(help="llama-3.1-8b, llama-3.1-70b, ... or a directory with a config.json."),
    ],
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200 or l40s.")],
    gpus: Annotated[int, typer.Option(min=0, help="How many. 0: as many as the workload's rate needs.")] = 0,
    workload: Annotated[
        str,
        typer.Option(help="chat, code, summary or long, or prompt=TOKENS,output=TOKENS; rate=PER_SECOND may follow."),
    ] = "chat",
    ttft: Annotated[float, typer.Option(min=0.001, help="Limit on the time to first token, in seconds.")] = 1.0,
    itl: Annotated[float, typer.Option(min=0.0001, help="Limit on the gaps between tokens, in seconds.")] = 0.05,
    attained: Annotated[float, typer.Option(min=0.5, max=0.999, help="Share of requests within both.")] = 0.9,
    dtype: Annotated[Literal["auto", "bf16", "fp8"], typer.Option(help="Of the weights. auto: as published.")] = "auto",
    kv_dtype: Annotated[Literal["bf16", "fp8"], typer.Option(help="Of the KV cache.")] = "bf16",
    compute_efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="What large steps reach of peak FLOP/s.")
    ] = 0.55,
    memory_efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="What decode steps reach of memory bandwidth.")
    ] = 0.75,
    usd_per_hour: Annotated[float, typer.Option(min=0, help="Of one GPU. 0: an assumption per kind.")] = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Say what a model needs on given GPUs, which pools suit a workload, and whether separating them pays at all."""
    options = _load(PLAN_OPTIONS)(
        model=model, gpu=gpu, num_gpus=gpus, workload=workload, ttft_s=ttft, itl_s=itl, attained=attained, dtype=dtype,
        kv_dtype=kv_dtype, compute_efficiency=compute_efficiency, memory_efficiency=memory_efficiency,
        usd_per_hour=usd_per_hour, json_file=json_file,
    )  # fmt: skip
    sys.exit(_load(PLAN_ENTRY)(options))


def _load(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)
