"""Real generations that the proxy asks for itself, at its start and for `/ready`.

Relies on vLLM 0.32: `AsyncLLM.generate`, which adds the request in the task that iterates; `tokens_input`.
"""

import asyncio
import logging
import random
import uuid

from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.scheduling.slo import PROBE, Standing
from proxy.supervision import ProxyStartError

log = logging.getLogger("twinpool.proxy")

SELF_TEST_TIMEOUT_S = 120.0
SELF_TEST_TOKENS = 96
SELF_TEST_ATTEMPTS = 3
SELF_TEST_PAUSE_S = 3.0
"""Longer than a worker takes to be taken back."""


async def self_test(llm: AsyncLLM, num_prompt_tokens: int) -> None:
    """One real generation, through both pools if the prompt is long enough; raises `ProxyStartError`.

    On a machine that is short of CPU a worker and the proxy may lose sight of each other while the server is being
    built, which ends the request and not the worker; so a failure is believed the third time.
    """
    try:
        async with asyncio.timeout(SELF_TEST_TIMEOUT_S):
            for attempt in range(1, SELF_TEST_ATTEMPTS + 1):
                try:
                    num_tokens = await generate_two(llm, num_prompt_tokens)
                    break
                except VLLMError as error:
                    log.warning("self_test_failed attempt=%d error=%s", attempt, error)
                    if attempt == SELF_TEST_ATTEMPTS:
                        raise
                    await asyncio.sleep(SELF_TEST_PAUSE_S)
    except TimeoutError as error:
        raise ProxyStartError(
            f"the self-test got no answer within {SELF_TEST_TIMEOUT_S:g} s; see the workers' logs"
        ) from error
    except VLLMError as error:
        raise ProxyStartError(f"the self-test through both pools failed: {error}; see the workers' logs") from error
    if num_tokens != 2:
        raise ProxyStartError(f"the self-test gave {num_tokens} tokens instead of 2; see the workers' logs")


async def generate_two(llm: AsyncLLM, num_prompt_tokens: int) -> int:
    """How many of the two tokens asked for came. Raises what vLLM raises.

    The prompt is one that no cache has, so its blocks have to move. Of the class `probe`: it is not counted.
    """
    num_prompt_tokens = max(1, min(num_prompt_tokens, llm.model_config.max_model_len - 4))
    vocab_size = min(llm.model_config.get_vocab_size(), 512)
    prompt = [random.randrange(vocab_size) for _ in range(num_prompt_tokens)]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    num_tokens = 0
    token = CURRENT.set(RequestContext(Standing(PROBE)))
    try:
        async for output in llm.generate(tokens_input(prompt), params, f"twinpool-self-test-{uuid.uuid4().hex}"):
            num_tokens = len(output.outputs[0].token_ids)
    finally:
        CURRENT.reset(token)
    return num_tokens
