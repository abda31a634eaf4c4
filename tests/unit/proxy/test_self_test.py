"""The self-test of a start: believed when it fails for the third time."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from proxy.frontend import vllm_self_test
from proxy.frontend.vllm_self_test import self_test
from proxy.middleware.request_context import current_standing
from proxy.supervision import ProxyStartError


class Engine:
    """Fails a number of times, then gives `num_tokens` tokens."""

    def __init__(self, failures: int, num_tokens: int = 2) -> None:
        self.asked: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 1000)
        self._failures = failures
        self._num_tokens = num_tokens

    async def generate(self, prompt: Any, _params: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append(request_id)
        self.prompts.append(tuple(prompt["prompt_token_ids"]))
        assert current_standing(0).slo.name == "probe", "clients' metrics have no part in it"
        if len(self.asked) <= self._failures:
            raise GracefulHTTPError("Worker decode-0 lost sight of the proxy", HTTPStatus.SERVICE_UNAVAILABLE)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * self._num_tokens)])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_self_test, "SELF_TEST_PAUSE_S", 0.0)


async def test_two_failures_are_forgiven() -> None:
    engine: Any = Engine(failures=2)
    await self_test(engine, 96)
    assert len(set(engine.asked)) == 3
    assert len(set(engine.prompts)) == 3, "a prompt that is cached would move nothing"
    assert {len(prompt) for prompt in engine.prompts} == {60}


async def test_the_third_failure_ends_the_start_and_is_told() -> None:
    engine: Any = Engine(failures=3)
    with pytest.raises(ProxyStartError, match="lost sight of the proxy"):
        await self_test(engine, 96)


async def test_an_answer_of_the_wrong_length_ends_the_start() -> None:
    engine: Any = Engine(failures=0, num_tokens=1)
    with pytest.raises(ProxyStartError, match="1 tokens instead of 2"):
        await self_test(engine, 96)
