"""LoRA adapters on P and D together: what crosses is what one engine computes, and adapters never share a block."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.launches import twinpool
from lab.server_process import Server, free_port
from tests.engine.observed import Watch, status
from tests.engine.random_adapter import RANK, make_random_adapter
from tests.engine.random_llama import make_random_llama
from tests.engine.servers import MODEL_NAME
from tests.engine.test_resharding import BLOCK, ENGINE, leave_decode_worker_alone, prompt_of

pytestmark = pytest.mark.timeout(420)

PROMPT = prompt_of(300)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poet", "clerk")):
        make_random_adapter(directory / name, seed)
    return directory


@pytest.fixture(scope="module")
def server(adapters: Path, tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Server]:
    config = {
        "model": str(make_random_llama(tmp_path_factory.mktemp("model"))),
        "served_model_name": MODEL_NAME,
        "engine": {**ENGINE, "enable_lora": True, "max_lora_rank": 2 * RANK, "max_loras": 2},
        "transfer": {"links": ["host"]},
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {
            "port": free_port(),
            "options": {
                "lora_modules": [{"name": "poet", "path": str(adapters / "poet")}],
                "enable_prompt_tokens_details": True,
            },
        },
    }
    launch = twinpool("lora", config, log_dir)
    launch = dataclasses.replace(launch, env={**launch.env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    server = Server(launch, log_dir)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def generate(server: Server, model: str) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were cached."""
    answer = post(
        server, "/v1/completions", model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True,
        return_token_ids=True, detokenize=False,
    ).raise_for_status().json()  # fmt: skip
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return list(answer["choices"][0]["token_ids"]), cached


def test_adapters_through_both_pools_answer_as_one_engine_alone(server: Server, adapters: Path) -> None:
    watch = Watch(server.url, "host")
    through_both = {name: generate(server, name) for name in (MODEL_NAME, "poet")}
    loaded = post(server, "/v1/load_lora_adapter", lora_name="clerk", lora_path=str(adapters / "clerk"))
    assert loaded.status_code == 200, loaded.text
    through_both["clerk"] = generate(server, "clerk")
    assert len({tuple(tokens) for tokens, _ in through_both.values()}) == 3
    assert [cached for _, cached in through_both.values()] == [0, 0, 0]
    moved = watch.after_handovers(3)
    assert (moved.remote_tokens, moved.local_tokens, moved.recomputed) == (3 * len(PROMPT), 0, 0)
    for name, (tokens, _) in through_both.items():
        again, cached = generate(server, name)
        assert again == tokens
        assert cached >= BLOCK
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == [MODEL_NAME, "poet", "clerk"]

    leave_decode_worker_alone(server)
    for name, (tokens, _) in through_both.items():
        alone, cached = generate(server, name)
        assert (alone, cached) == (tokens, 0)

    assert post(server, "/v1/unload_lora_adapter", lora_name="clerk").status_code == 200
    gone = post(server, "/v1/completions", model="clerk", prompt=PROMPT, max_tokens=1)
    assert gone.status_code == 404
    missing = post(server, "/v1/load_lora_adapter", lora_name="clerk", lora_path=str(adapters / "nobody"))
    assert missing.status_code == 404
    assert [adapter.name for adapter in status(server.url).adapters] == ["poet"]
