"""What one plain vLLM server answers: recorded in one go, then the server is stopped.

On two cores the yardstick and the cluster would slow each other down, and engines that batch together
round differently. So the session starts the single server, sends it everything that any engine test
wants to compare with, one request at a time, and stops it before the cluster comes up.
"""

from collections.abc import Callable, Sequence

import msgspec

from lab.server_process import Server
from tests.engine.raw_cases import RAW_CASES, RawReply, send_raw
from tests.engine.replies import Case, Reply, openai_client, send
from tests.engine.reply_cases import REFUSALS, REPLY_CASES
from tests.engine.servers import http, reset_prefix_caches
from tests.engine.token_cases import CROWD, TOKEN_CASES, TokenReply, generate, margins


class Golden(msgspec.Struct, frozen=True):
    """Everything the single server said, by the names of the cases."""

    replies: dict[str, Reply]
    raw: dict[str, RawReply]
    cold_tokens: dict[str, TokenReply]
    warm_tokens: dict[str, TokenReply]
    """The same prompts, sent again right after."""
    margins: dict[str, list[float]]
    """Of the cases that are sent all at once."""


def send_as_told(server: Server, case: Case) -> Reply:
    """Sends a case to a server with cold prefix caches; once more, if the case wants them warm."""
    reset_prefix_caches(server)
    with openai_client(server) as client:
        reply = send(client, case)
        return send(client, case) if case.warm else reply


def record(server: Server, encode_prompt: Callable[[int, int], Sequence[int]]) -> Golden:
    """Asks the single server everything. `encode_prompt` makes (seed, num_tokens) a prompt."""
    replies = {case.name: send_as_told(server, case) for case in (*REPLY_CASES, *REFUSALS)}
    cold: dict[str, TokenReply] = {}
    warm: dict[str, TokenReply] = {}
    with http(server) as client:
        raw = {case.name: send_raw(client, case) for case in RAW_CASES}
        for case in TOKEN_CASES:
            prompt = encode_prompt(case.seed, case.num_tokens)
            reset_prefix_caches(server)
            cold[case.name] = generate(client, prompt, case.max_tokens, stream=False)
            warm[case.name] = generate(client, prompt, case.max_tokens, stream=True)
        beaten_by = {
            case.name: margins(client, encode_prompt(case.seed, case.num_tokens), case.max_tokens) for case in CROWD
        }
    return Golden(replies=replies, raw=raw, cold_tokens=cold, warm_tokens=warm, margins=beaten_by)
