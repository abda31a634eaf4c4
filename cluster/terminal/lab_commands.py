"""The commands of `twinpool lab`. What they do lies in `lab`, which this room may not import (docs/decisions.md)."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

LINKS_ENTRY = "lab.links.command:run_links"
LOAD_ENTRY = "lab.load.command:run_load"
LOAD_OPTIONS = "lab.load.command:LoadOptions"

lab_app = typer.Typer(no_args_is_help=True, help="Measure this machine, and servers.")

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")]


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
        list[str],
        typer.Option(
            "--work",
            "-w",
            metavar="CLASS",
            help="NAME=RATE/s,PROMPT+OUTPUT in tokens, then ttft= and itl= (limits in seconds), turns= and think= "
            "(sessions of several turns), shared= (tokens that all sessions begin with). May be given several times: "
            "chat=0.5/s,128+64,ttft=3,itl=0.1",
        ),
    ],
    seconds: Annotated[float, typer.Option(min=0.1, help="How long sessions begin.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed is the same work.")] = 1,
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
    options = _load(LOAD_OPTIONS)(
        url=url, work=work, seconds=seconds, seed=seed, process=process, cv=cv, model=model, api_key=api_key,
        tokenizer=tokenizer, class_header=class_header, timeout_s=timeout_s, plain=plain, jsonl_file=jsonl_file,
        json_file=json_file,
    )  # fmt: skip
    sys.exit(_load(LOAD_ENTRY)(options))


def _load(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)
