"""Prefill and decode workers with other numbers of ranks and other block sizes give the tokens of a single engine.

The model has the 80 layers, 64 heads and 8 KV heads of a 70B model. The single engine is a decode worker with one rank,
when the prefill workers before it have left.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.status import ClusterStatus
from lab.launches import twinpool
from lab.server_process import Server, free_port
from tests.engine.observed import Movement, Watch, status, wait_until
from tests.engine.random_llama import HEAD_SIZE, OF_70B, VOCABULARY, make_random_llama
from tests.engine.servers import MODEL_NAME

pytestmark = pytest.mark.timeout(600)  # the first test of a cluster waits for its start

BLOCK = 32
KV_BYTES_PER_TOKEN = OF_70B.layers * 2 * OF_70B.kv_heads * HEAD_SIZE * 4
ENGINE = {
    "max_model_len": 1024, "max_num_batched_tokens": 144, "max_num_seqs": 8, "block_size": BLOCK, "dtype": "float32",
    "seed": 0, "enforce_eager": True, "num_gpu_blocks_override": 64, "skip_tokenizer_init": True,
}  # fmt: skip
MAX_TOKENS = 8
LENGTHS = (2, 31, 32, 33, 64, 145, 300)
"""Less than a block, blocks with and without a rest, and several chunks that end inside of blocks."""


def prompt_of(num_tokens: int) -> list[int]:
    return [random.Random(num_tokens).randrange(3, VOCABULARY) for _ in range(num_tokens)]


def generate(server: Server, prompt: list[int]) -> list[int]:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).raise_for_status()
    (choice,) = answer.json()["choices"]
    return list(choice["token_ids"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_random_llama(tmp_path_factory.mktemp("random-llama"), OF_70B))


@dataclass(frozen=True)
class Answer:
    """To one prompt, and how it came about."""

    tokens: list[int]
    moved: Movement


@dataclass(frozen=True)
class Answers:
    """Of a cluster to the prompts of all lengths."""

    by_length: dict[int, Answer]
    status: ClusterStatus


@contextmanager
def _cluster(name: str, model: str, log_dir: Path, link: str, **pools: dict[str, Any]) -> Iterator[Server]:
    config = {
        "model": model,
        "served_model_name": MODEL_NAME,
        "engine": ENGINE,
        "pools": pools,
        "transfer": {"links": [link], "peer_lost_after_s": 60},  # ranks that share a core keep each other waiting
        "liveness": {"dead_after_s": 60, "proxy_lost_after_s": 60},
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {"port": free_port()},
    }
    server = Server(twinpool(name, config, log_dir), log_dir)
    try:
        server.wait_until_healthy(deadline_s=480)
        yield server
    finally:
        server.stop()


def _ask_all(server: Server, link: str) -> Answers:
    answers = {}
    for length in LENGTHS:
        watch = Watch(server.url, link)
        tokens = generate(server, prompt_of(length))
        answers[length] = Answer(tokens, watch.after_handovers())
    return Answers(answers, status(server.url))


def leave_decode_worker_alone(server: Server) -> None:
    """The prefill worker leaves, and the decode worker forgets what it has got from it."""
    httpx.post(f"{server.url}/twinpool/workers/prefill-0/drain", timeout=60).raise_for_status()
    wait_until(
        "the prefill worker has left",
        lambda: all(worker.state == "drained" for worker in status(server.url).workers if worker.role == "prefill"),
        60,
    )
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def two_ranks_to_one(model: str, log_dir: Path) -> tuple[Answers, dict[int, list[int]]]:
    """What a cluster answers, and then its decode worker alone."""
    with _cluster("tp2-tp1", model, log_dir, "zmq", prefill={"tensor_parallel": 2}, decode={}) as server:
        answers = _ask_all(server, "zmq")
        leave_decode_worker_alone(server)
        return answers, {length: generate(server, prompt_of(length)) for length in LENGTHS}


@pytest.fixture(scope="module")
def single_engines(two_ranks_to_one: tuple[Answers, dict[int, list[int]]]) -> dict[int, list[int]]:
    """The tokens of a single engine with one rank, by the length of the prompt."""
    return two_ranks_to_one[1]


def _check(answers: Answers, single_engines: dict[int, list[int]], block_moved: int) -> None:
    """Every prompt prefilled by P, copied by D in blocks of `block_moved` tokens, and continued as a single engine."""
    for length, answer in answers.by_length.items():
        assert answer.tokens == single_engines[length], f"{length} tokens"
        moved = answer.moved
        assert (moved.remote_tokens, moved.local_tokens, moved.recomputed) == (length, 0, 0)
        assert moved.bytes_ == moved.bytes_over_any_link > 0
        # Rank 0 of D speaks for all: it moves its share of the heads.
        assert KV_BYTES_PER_TOKEN * -(-length // block_moved) * block_moved % moved.bytes_ == 0
    assert answers.status.refused_pairs == []
    for worker in answers.status.workers:
        assert worker.blocks.free + worker.blocks.used + worker.blocks.leased == worker.blocks.total


def test_the_yardstick_depends_on_the_whole_prompt(single_engines: dict[int, list[int]]) -> None:
    """Otherwise wrong blocks would not show."""
    assert len({tuple(tokens) for tokens in single_engines.values()}) == len(LENGTHS)
    assert sum(len(set(tokens)) for tokens in single_engines.values()) > MAX_TOKENS * len(LENGTHS) // 2


def test_two_ranks_hand_over_to_one(
    two_ranks_to_one: tuple[Answers, dict[int, list[int]]], single_engines: dict[int, list[int]]
) -> None:
    _check(two_ranks_to_one[0], single_engines, BLOCK)


def test_one_rank_hands_over_to_two_with_smaller_blocks(
    model: str, single_engines: dict[int, list[int]], log_dir: Path
) -> None:
    larger = {"engine": {"block_size": 2 * BLOCK, "num_gpu_blocks_override": 32}}
    with _cluster("tp1-tp2", model, log_dir, "host", prefill=larger, decode={"tensor_parallel": 2}) as server:
        _check(_ask_all(server, "host"), single_engines, BLOCK)
