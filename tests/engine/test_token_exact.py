"""Greedy tokens through P and D are the tokens of a single vLLM engine, whatever was cached where."""

import concurrent.futures

import pytest

from lab.server_process import Server
from tests.engine.conftest import PromptMaker
from tests.engine.golden import Golden
from tests.engine.observed import Watch, counters, worker
from tests.engine.servers import BLOCK, CHUNK, CONTEXT, PREFILL_BLOCKS, http, reset_prefix_caches
from tests.engine.token_cases import CROWD, TOKEN_CASES, TokenCase, TokenReply, generate

pytestmark = pytest.mark.timeout(300)  # the first test of a cluster waits for its start

KV_BYTES_PER_BLOCK = 30 * 2 * 3 * 64 * 2 * BLOCK
"""30 layers, K and V, 3 heads of 64 numbers, 2 bytes each."""
TIE = 0.25
"""bf16 logits of this size come in steps of an eighth: two steps may be rounding."""
EDGES = [case for case in TOKEN_CASES if case.num_tokens in (129, 193, 256, 257, 385, 577)]
LAST_CHUNKS = [case for case in TOKEN_CASES if case.num_tokens in (1, 2, 64, 127, 128, 193, 257, 384, 700, CONTEXT - 2)]
"""Of one token, one block, a chunk and one token, whole chunks, and with a rest of a block at the end."""


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def _lacking(case: TokenCase) -> int:
    """Blocks that D still lacks when it has every full block of the prompt; it never computes the prompt's end."""
    return _blocks(case.num_tokens) - case.num_tokens // BLOCK


def _tell_apart(ours: TokenReply, theirs: TokenReply) -> str:
    return f"through P and D {ours}, from a single vLLM engine {theirs}"


def _ask(server: Server, link: str, case: TokenCase, prompt: list[int], *, stream: bool) -> tuple[TokenReply, int]:
    """The reply and the blocks that moved for it; fails unless the whole prompt was prefilled by P."""
    watch = Watch(server.url, link)
    with http(server) as client:
        reply = generate(client, prompt, case.max_tokens, stream=stream)
    moved = watch.after_handovers()
    assert moved.remote_tokens == case.num_tokens
    assert moved.local_tokens == 0
    assert moved.recomputed == 0
    assert moved.bytes_over_any_link == moved.bytes_
    assert moved.bytes_ % KV_BYTES_PER_BLOCK == 0
    return reply, int(moved.bytes_) // KV_BYTES_PER_BLOCK


def _cold_then_warm(
    server: Server, link: str, case: TokenCase, golden: Golden, prompt: list[int], stream_first: bool
) -> None:
    reset_prefix_caches(server)
    cold, moved = _ask(server, link, case, prompt, stream=stream_first)
    assert cold == golden.cold_tokens[case.name], _tell_apart(cold, golden.cold_tokens[case.name])
    assert moved == _blocks(case.num_tokens)

    warm, moved = _ask(server, link, case, prompt, stream=not stream_first)
    assert warm == golden.warm_tokens[case.name], _tell_apart(warm, golden.warm_tokens[case.name])
    assert moved == _lacking(case), "D fetches only what it lacks"


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_tokens_over_link_host_are_a_single_engines(
    case: TokenCase, golden: Golden, cluster: Server, make_prompt: PromptMaker
) -> None:
    prompt = make_prompt(case.seed, case.num_tokens)
    _cold_then_warm(cluster, "host", case, golden, prompt, stream_first=False)


@pytest.mark.parametrize("case", LAST_CHUNKS, ids=lambda case: case.name)
def test_tokens_over_link_zmq_are_a_single_engines(
    case: TokenCase, golden: Golden, zmq_cluster: Server, make_prompt: PromptMaker
) -> None:
    prompt = make_prompt(case.seed, case.num_tokens)
    _cold_then_warm(zmq_cluster, "zmq", case, golden, prompt, stream_first=True)


def test_announcing_layers_leaves_less_to_copy_when_the_prefill_ends(
    zmq_cluster: Server, make_prompt: PromptMaker
) -> None:
    last_chunk = KV_BYTES_PER_BLOCK * _blocks(CHUNK)
    left = []
    for seed in range(950, 955):
        before = counters(zmq_cluster.url)
        watch = Watch(zmq_cluster.url, "zmq")
        with http(zmq_cluster) as client:
            generate(client, make_prompt(seed, 2 * CHUNK), 2, stream=False)
        assert watch.after_handovers().bytes_ == KV_BYTES_PER_BLOCK * _blocks(2 * CHUNK)
        name = "twinpool_handover_bytes_left_sum"
        left.append(counters(zmq_cluster.url)[name] - before.get(name, 0.0))
    assert min(left) < last_chunk / 2, f"of {last_chunk} bytes of a last chunk {left} were left"


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
def test_tokens_are_exact_when_only_p_has_the_prefix(
    case: TokenCase, golden: Golden, cluster: Server, make_prompt: PromptMaker
) -> None:
    reset_prefix_caches(cluster)
    prompt = make_prompt(case.seed, case.num_tokens)
    with http(cluster) as client:
        generate(client, prompt, 1, stream=False)  # one token: P answers alone, D never sees it

    reply, moved = _ask(cluster, "host", case, prompt, stream=False)

    assert reply == golden.warm_tokens[case.name], _tell_apart(reply, golden.warm_tokens[case.name])
    assert moved == _blocks(case.num_tokens), "D had nothing"


def test_tokens_are_exact_when_only_d_has_the_prefix(golden: Golden, cluster: Server, make_prompt: PromptMaker) -> None:
    reset_prefix_caches(cluster)
    prompts = {case: make_prompt(case.seed, case.num_tokens) for case in EDGES}
    with http(cluster) as client:
        for case, prompt in prompts.items():
            generate(client, prompt, case.max_tokens, stream=False)
        # Prompts that are answered by P alone push everything else out of its cache, and leave D's as it is.
        for seed in (900, 901):
            generate(client, make_prompt(seed, PREFILL_BLOCKS // 2 * BLOCK), 1, stream=False)

    for case, prompt in prompts.items():
        reply, moved = _ask(cluster, "host", case, prompt, stream=True)
        assert reply == golden.cold_tokens[case.name], _tell_apart(reply, golden.cold_tokens[case.name])
        assert moved == _lacking(case), "D fetches only what it lacks"


def test_eight_requests_at_once_get_the_tokens_each_gets_alone(
    golden: Golden, cluster: Server, make_prompt: PromptMaker
) -> None:
    reset_prefix_caches(cluster)
    watch = Watch(cluster.url, "host")

    def ask(case: TokenCase) -> TokenReply:
        with http(cluster) as client:
            return generate(client, make_prompt(case.seed, case.num_tokens), case.max_tokens, stream=True)

    with concurrent.futures.ThreadPoolExecutor(len(CROWD)) as pool:
        replies = list(pool.map(ask, CROWD))

    assert watch.after_handovers(len(CROWD)).remote_tokens == sum(case.num_tokens for case in CROWD)
    for case, reply in zip(CROWD, replies, strict=True):
        alone = golden.cold_tokens[case.name].token_ids
        assert len(reply.token_ids) == len(alone)
        differs = next(
            (at for at, (ours, theirs) in enumerate(zip(reply.token_ids, alone, strict=True)) if ours != theirs), -1
        )
        assert differs == -1 or golden.margins[case.name][differs] <= TIE, f"{case.name}: {reply}, alone {alone}"


@pytest.mark.parametrize("fixture", ["cluster", "zmq_cluster"])
def test_blocks_add_up_after_all_that(fixture: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(fixture)
    for worker_id in ("prefill-0", "decode-0"):
        blocks = worker(server.url, worker_id).blocks
        assert blocks.free + blocks.used + blocks.leased == blocks.total
