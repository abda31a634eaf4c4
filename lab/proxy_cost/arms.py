"""What is compared, and how each of it is started."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.launches import twinpool
from lab.proxy_cost.engine_process import MAX_MODEL_LEN, free_engine
from lab.proxy_cost.work import PROMPT_TOKENS
from lab.server_process import Launch, free_port

MODEL_NAME = "free"
ROUTER = "vllm-router"
VLLM, VLLM_IN_PROCESS, TWINPOOL, TWINPOOL_PD = "vLLM", "vLLM, no sockets", "twinpool", "twinpool 1P1D"
VLLM_ROUTED = f"{ROUTER}, vLLM behind"

_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Arm:
    """One way to serve."""

    name: str
    launch: Launch
    behind: str = ""
    """Name of the arm whose server this one sends its requests on to."""


def arms(model: str, directory: Path, step_s: float, with_pd: bool) -> list[Arm]:
    """All that can be started here; what others send requests on to comes before these. `step_s` as for engines."""
    vllm = _vllm("sockets", model, step_s)
    found = [
        Arm(VLLM, vllm),
        Arm(VLLM_IN_PROCESS, _vllm("in-process", model, step_s)),
        Arm(TWINPOOL, _twinpool("twinpool", model, directory, step_s, prefill_workers=0)),
    ]
    if with_pd:
        found.append(Arm(TWINPOOL_PD, _twinpool("twinpool-1p1d", model, directory, step_s, prefill_workers=1)))
    router = router_command()
    if router:
        found.append(Arm(VLLM_ROUTED, _router(router, vllm.port), behind=VLLM))
    return found


def router_command() -> str:
    """Where vllm-router is; empty if it is not installed (extra `peers`)."""
    beside = Path(sys.executable).parent / ROUTER
    return str(beside) if beside.exists() else shutil.which(ROUTER) or ""


def _vllm(engine: str, model: str, step_s: float) -> Launch:
    port = free_port()
    return Launch(
        name=f"vllm-{engine}",
        command=[
            *(sys.executable, "-m", "lab.proxy_cost.vllm_server", engine, str(step_s)),
            *(f"--model={model}", f"--served-model-name={MODEL_NAME}", "--host=127.0.0.1", f"--port={port}"),
            f"--max-model-len={MAX_MODEL_LEN}",
            # As twinpool's server is, unless told otherwise.
            *("--disable-uvicorn-access-log", "--uvicorn-log-level=warning"),
        ],
        port=port,
        env=_QUIET,
    )


def _twinpool(name: str, model: str, directory: Path, step_s: float, prefill_workers: int) -> Launch:
    config: Mapping[str, Any] = {
        "model": model,
        "served_model_name": MODEL_NAME,
        "engine": "simulated",
        "simulation": {**free_engine(step_s), "max_model_len": MAX_MODEL_LEN},
        "pools": {"prefill": {"replicas": prefill_workers}, "decode": {"replicas": 1}},
        "scheduling": {"remote_prefill_min_tokens": PROMPT_TOKENS if prefill_workers else MAX_MODEL_LEN},
        "server": {"port": free_port()},
    }
    return twinpool(name, config, directory)


def _router(command: str, port_behind: int) -> Launch:
    port = free_port()
    return Launch(
        name=ROUTER,
        command=[
            command,
            *("--worker-urls", f"http://127.0.0.1:{port_behind}", "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ],
        port=port,
        env={},
    )
