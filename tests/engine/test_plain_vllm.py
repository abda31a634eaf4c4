"""The connector in a plain vLLM server, without a twinpool proxy: it exports to itself and imports again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.launches import bare_vllm
from lab.server_process import Server, free_port
from tests.engine.conftest import PromptMaker
from tests.engine.servers import DECODE_BLOCKS, ENGINE_OPTIONS, MODEL_NAME, http, reset_prefix_caches

CONNECTOR = {
    "kv_connector": "TwinpoolConnector",
    "kv_connector_module_path": "kvtransfer.vllm_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"bind": "tcp://127.0.0.1:0"},
}
NUM_TOKENS = 300

pytestmark = pytest.mark.timeout(420)  # the first test starts an engine


@pytest.fixture(scope="module")
def plain(model_path: str, log_dir: Path) -> Iterator[Server]:
    flags = {
        **ENGINE_OPTIONS,
        "num_gpu_blocks_override": DECODE_BLOCKS,
        "kv_transfer_config": json.dumps(CONNECTOR),
    }
    launch = bare_vllm("plain-vllm", model_path, MODEL_NAME, free_port(), flags, core="0", kv_gib=1)
    server = Server(launch, log_dir)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def complete(server: Server, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with http(server) as client:
        answer = client.post("/v1/completions", json=body | {"kv_transfer_params": params} if params else body)
    answer.raise_for_status()
    reply: dict[str, Any] = answer.json()
    return reply


def test_an_exported_prompt_is_continued_as_if_it_had_been_computed_here(
    plain: Server, make_prompt: PromptMaker
) -> None:
    prompt = make_prompt(71, NUM_TOKENS)
    expected = complete(plain, prompt, 12, None)["choices"][0]["text"]
    reset_prefix_caches(plain)
    exported = complete(plain, prompt, 1, {"mode": "export", "transfer_id": "plain-transfer-1"})
    params = exported["kv_transfer_params"]
    assert params["mode"] == "import"
    assert params["exporter"]["ranks"][0]["address"].startswith("tcp://127.0.0.1:")
    continued = complete(plain, prompt, 12, params)
    assert continued["choices"][0]["text"] == expected
    with http(plain) as client:
        metrics = client.get("/metrics").text
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
    assert sum(float(line.split()[-1]) for line in hits) > 0, "nothing came through the connector"


def test_a_transfer_that_does_not_exist_is_recomputed(plain: Server, make_prompt: PromptMaker) -> None:
    prompt = make_prompt(72, NUM_TOKENS)
    expected = complete(plain, prompt, 8, None)["choices"][0]["text"]
    reset_prefix_caches(plain)
    exported = complete(plain, prompt, 1, {"mode": "export", "transfer_id": "plain-transfer-2"})
    params = exported["kv_transfer_params"] | {"transfer_id": "never-was-there"}
    reset = complete(plain, make_prompt(73, 40), 1, None)  # an ordinary request in between is not disturbed
    assert reset["choices"][0]["finish_reason"] == "length"
    assert complete(plain, prompt, 8, params)["choices"][0]["text"] == expected


@pytest.mark.parametrize("params", [{"mode": "import"}, {"mode": "nonsense"}, {"transfer_id": 7}])
def test_nonsense_parameters_do_not_hurt_the_server(
    plain: Server, make_prompt: PromptMaker, params: dict[str, Any]
) -> None:
    prompt = make_prompt(74, 60)
    assert (
        complete(plain, prompt, 4, params)["choices"][0]["text"]
        == complete(plain, prompt, 4, None)["choices"][0]["text"]
    )
