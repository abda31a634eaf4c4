import json
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from lab.kill_storm import Storm, StreamFailed, Work, answer, make_work, table_of

TOKEN = {"choices": [{"token_ids": [7, 8]}]}
ERROR = {"error": {"message": "Worker decode-0 was killed by SIGKILL"}}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server that says what the first token of the prompt asks for."""

    async def complete(request: web.Request) -> web.StreamResponse:
        kind = (await request.json())["prompt"][0]
        if kind == 503:
            return web.json_response(ERROR, status=503)
        reply = web.StreamResponse()
        await reply.prepare(request)
        events = [TOKEN, TOKEN, *([ERROR] if kind == 1 else [])]
        for event in events:
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if kind != 2:
            await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_whole_stream_is_its_tokens(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        tokens, longest_gap_s = await answer(session, url, "m", Work((0,), 4))
    assert tokens == [7, 8, 7, 8]
    assert 0 <= longest_gap_s < 1


@pytest.mark.parametrize(
    ("kind", "what"), [(503, "503 .*killed by SIGKILL"), (1, "in mid-stream: Worker decode-0"), (2, "broke off")]
)
async def test_a_stream_that_fails_is_not_taken_for_a_short_one(url: str, kind: int, what: str) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(StreamFailed, match=what):
            await answer(session, url, "m", Work((kind,), 4))


def test_the_same_seed_is_the_same_work() -> None:
    works = make_work(random.Random(1), 5, (3, 9), (2, 4))
    assert works == make_work(random.Random(1), 5, (3, 9), (2, 4))
    assert all(3 <= len(work.prompt) <= 9 and 2 <= work.max_tokens <= 4 for work in works)


def test_every_kind_of_end_is_shown() -> None:
    storm = Storm(equal=3, differing=1)
    storm.failed["503 nobody"] = 2
    storm.kills["decode-0"] = 4
    cells = [list(column.cells) for column in table_of(storm, 20).columns]
    assert cells[1] == ["4 x decode-0", "6", "3", "1", "2 x 503 nobody", "0.00 s"]
