"""The servers under test: one plain vLLM server, and a twinpool cluster with the same engine options."""

import ssl
from typing import Any

import httpx

from lab.launches import bare_vllm
from lab.server_process import Launch, Server

BLOCK = 128
CHUNK = 192
"""max_num_batched_tokens: not a multiple of the block size, so that chunks end inside blocks."""
CONTEXT = 2048

ENGINE_OPTIONS: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 32,
    "block_size": BLOCK,
    "dtype": "bfloat16",
    "seed": 0,
    "enforce_eager": True,  # starts in 30 s instead of 80 s; a decode step costs 34 ms instead of 29 ms
}
FRONTEND_FLAGS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_tokens_details": True,
}
PREFILL_BLOCKS = 24
"""Room for one and a half prompts of the longest kind: two long ones push everything else out of P's cache."""
DECODE_BLOCKS = 160
DECODE_SEQUENCES = 8
MODEL_NAME = "smollm2"
REQUEST_DEADLINE_S = 60.0
PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of these servers, which speak no TLS: reading the list of authorities would take longer than asking."""


def single_vllm(model: str, port: int) -> Launch:
    """The yardstick: the same engine options and frontend flags, on one core."""
    flags = {**ENGINE_OPTIONS, **FRONTEND_FLAGS, "num_gpu_blocks_override": DECODE_BLOCKS}
    return bare_vllm("single-vllm", model, MODEL_NAME, port, flags, core="1", kv_gib=1)


def cluster_config(model: str, port: int, **changes: Any) -> dict[str, Any]:
    """1P1D with the yardstick's engine options, every prompt prefilled remotely; `changes` replace top-level keys."""
    config: dict[str, Any] = {
        "model": model,
        "served_model_name": MODEL_NAME,
        "engine": dict(ENGINE_OPTIONS),
        "pools": {
            "prefill": {"engine": {"num_gpu_blocks_override": PREFILL_BLOCKS}},
            "decode": {"engine": {"num_gpu_blocks_override": DECODE_BLOCKS, "max_num_seqs": DECODE_SEQUENCES}},
        },
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {"port": port, "options": dict(FRONTEND_FLAGS)},
    }
    return {**config, **changes}


def http(server: Server) -> httpx.Client:
    """A client that presents the API key."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    return httpx.Client(base_url=server.url, timeout=REQUEST_DEADLINE_S, headers=headers, verify=PLAIN_HTTP)


def reset_prefix_caches(server: Server) -> None:
    """Every engine behind this server forgets its cached prefixes; fails if some blocks are still in use."""
    with http(server) as client:
        client.post("/reset_prefix_cache").raise_for_status()
