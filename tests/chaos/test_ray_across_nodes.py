"""A decode worker with one rank on each of two Ray nodes: its tokens, and the death of one of them.

It takes two to three minutes and four processes with vLLM in them, so it is run by hand:
`python -m pytest -m by_hand tests/chaos/test_ray_across_nodes.py`.
"""

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from lab.launches import twinpool
from lab.server_process import Server, free_port
from tests.chaos.test_ray import ray_address as ray_address
from tests.engine.observed import Watch, wait_until, worker
from tests.engine.random_llama import VOCABULARY, make_random_llama

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(900)]

MODEL_NAME = "tiny"
PROMPT = [3 + (7 * index) % (VOCABULARY - 3) for index in range(150)]
TOKENS = 16
RANK = "ray::AcrossNodesRank"


def _config(model: str, ray_address: str) -> dict[str, Any]:
    return {
        "model": model,
        "served_model_name": MODEL_NAME,
        "engine": {
            "max_model_len": 512, "max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 32, "dtype": "float32",
            "enforce_eager": True, "num_gpu_blocks_override": 64, "skip_tokenizer_init": True,
        },
        "pools": {"decode": {"tensor_parallel": 2, "across_nodes": True}},
        "launch": "ray",
        # Each node has one of `for_rank`, so that the ranks cannot be on the same.
        "ray": {"address": ray_address, "resources": {"decode": {"for_rank": 1}}, "claim_timeout_s": 30},
        "scheduling": {"remote_prefill_min_tokens": 1},
        "liveness": {"dead_after_s": 60, "proxy_lost_after_s": 60},
        "transfer": {"peer_lost_after_s": 60},
        "server": {"port": free_port()},
    }  # fmt: skip


def _expected(model: str) -> list[int]:
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = network.generate(
        torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def _generate(url: str) -> list[int]:
    body = {
        "model": MODEL_NAME, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def _ranks() -> dict[int, psutil.Process]:
    """By the process of their node."""
    found = [process for process in psutil.process_iter() if RANK in _title(process)]
    return {process.ppid(): process for process in found}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_worker_whose_ranks_are_on_two_nodes_answers_as_one_process_and_survives_a_rank(
    tmp_path: Path, ray_address: str, log_dir: Path
) -> None:
    model = str(make_random_llama(tmp_path))
    expected = _expected(model)
    server = Server(twinpool("across-nodes", _config(model, ray_address), log_dir), log_dir)
    try:
        server.wait_until_healthy(deadline_s=400)
        ranks = _ranks()
        assert len(ranks) == 2, "one per node"
        watch = Watch(server.url, "host")
        assert _generate(server.url) == expected
        assert watch.after_handovers().bytes_over_any_link > 0

        old = worker(server.url, "decode-0")
        list(ranks.values())[-1].kill()
        wait_until("it is missed", lambda: worker(server.url, "decode-0").starts == 1, 60)
        wait_until("it is ready", lambda: worker(server.url, "decode-0").state == "ready", 300)
        assert worker(server.url, "decode-0").epoch != old.epoch
        assert _generate(server.url) == expected
    finally:
        server.stop()
    wait_until("the ranks are gone", lambda: _ranks() == {}, 30)
