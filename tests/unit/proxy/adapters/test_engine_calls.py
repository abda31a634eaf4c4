"""What becomes of calls of engines whose answers nobody waits for any more."""

import asyncio

import msgspec
import pytest

from cluster import messages
from proxy.workers.engine_calls import EngineCalls, UtilityError
from tests.unit.proxy.test_roster import roster


async def test_a_call_that_is_given_up_leaves_nothing_behind_and_its_answer_is_ignored() -> None:
    sent: list[messages.Utility] = []
    calls = EngineCalls(lambda _worker_id, message: not sent.append(message))
    (worker,) = roster("decode-0").alive()
    call = asyncio.create_task(calls.each([worker], "add_lora", []))
    await asyncio.sleep(0)
    assert len(sent) == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert not calls._waiting
    calls.reply(worker, messages.UtilityReply(sent[0].call_id, "", msgspec.Raw(msgspec.msgpack.encode(True))))


async def test_a_worker_that_does_not_answer_in_time_is_named() -> None:
    calls = EngineCalls(lambda _worker_id, _message: True)
    (worker,) = roster("decode-0").alive()
    answers = await calls.each([worker], "add_lora", [], timeout_s=0.01)
    assert isinstance(answers["decode-0"], UtilityError)
    assert "decode-0 did not answer add_lora within 0.01 s" in str(answers["decode-0"])
    await asyncio.sleep(0)
    assert not calls._waiting
