"""From headers and body to the standing that generations see, whichever task they run in."""

import asyncio
import json
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from cluster.configuration.slo import SloConfig
from proxy.middleware.request_context import PriorityOutOfRange, current_standing
from proxy.middleware.request_standing import RequestStanding, model_of, said_by_headers
from proxy.middleware.status_line import StatusLine
from proxy.scheduling.slo import Standing
from proxy.slo.rules import SloRules

RULES = SloRules(
    SloConfig.model_validate({"classes": {"gold": {"api_keys": ["k"], "priority": 3}, "batch": {"models": ["b"]}}})
)


async def ask(
    body: bytes = b"", rules: SloRules = RULES, path: str = "/v1/completions", kind: str = "http", **headers: str
) -> tuple[list[Message], list[Standing], bytes]:
    """What was sent, the standings that the handler saw, and the body it read."""
    seen: list[Standing] = []
    read = b""

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        nonlocal read

        async def generation() -> None:
            seen.append(current_standing(2))

        if kind == "http":
            while True:
                message = await receive()
                read += message["body"]
                if not message["more_body"]:
                    break
        seen.append(current_standing(0))
        # Background work and the children of a batch run in tasks of their own.
        await asyncio.create_task(generation())

    incoming = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:], "more_body": False},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": "POST", "path": path, "headers": raw}
    await StatusLine(RequestStanding(app, rules))(scope, receive, send)
    return sent, seen, read


async def test_every_task_of_a_request_sees_its_standing_and_adds_its_own_priority() -> None:
    _, (standing, generation), _ = await ask(Authorization="Bearer k")
    assert (standing.slo.name, standing.priority) == ("gold", 3)
    assert (generation.slo.name, generation.priority) == ("gold", 5)
    assert generation.tenant == standing.tenant != ""
    assert current_standing(0) == Standing(), "nothing is left behind"


@pytest.mark.parametrize("priority", [1 << 62, -(1 << 62), 1001, -1001])
async def test_a_priority_that_would_go_before_everybodys_is_refused(priority: int) -> None:
    with pytest.raises(PriorityOutOfRange, match=f"priority is {priority}, but this server takes -1000 to 1000"):
        current_standing(priority)
    assert current_standing(-1000).priority == -1000


async def test_the_operator_says_which_priorities_there_are() -> None:
    rules = SloRules(SloConfig(priority_range=0))

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        assert current_standing(0) == Standing(rules.classes["default"])
        with pytest.raises(PriorityOutOfRange):
            current_standing(-1)

    await RequestStanding(app, rules)({"type": "http", "method": "POST"}, None, None)  # type: ignore[arg-type]


async def test_the_models_name_decides_and_the_body_arrives_whole() -> None:
    body = json.dumps({"messages": [{"content": "hi", "model": "gold"}], "model": "b"}).encode()
    _, seen, read = await ask(body)
    assert seen[0].slo.name == "batch"
    assert read == body


@pytest.mark.parametrize("body", [b"", b"no json", b'["model"]', b'{"model": 7}', b'{"model": null}', b"\xff\xfe{}"])
def test_a_body_that_names_no_model_decides_nothing(body: bytes) -> None:
    assert model_of(body) == ""


@pytest.mark.parametrize(
    ("path", "envelope"),
    [
        ("/v1/chat/completions", {"type": "BadRequestError", "param": "X-Slo-Class", "code": 400}),
        ("/v1/messages", {"type": "invalid_request_error"}),
    ],
)
async def test_an_unknown_class_is_a_400_in_the_style_of_the_api(path: str, envelope: dict[str, Any]) -> None:
    sent, seen, _ = await ask(path=path, X_Slo_Class="god")
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert "use one of: default, batch" in error.pop("message")
    assert error == envelope
    assert seen == []


async def test_a_class_of_other_keys_is_a_403() -> None:
    sent, seen, _ = await ask(X_Slo_Class="gold", Authorization="Basic k")
    assert sent[0]["status"] == 403
    assert seen == []


async def test_a_websocket_has_a_class_too() -> None:
    _, seen, _ = await ask(kind="websocket", X_Slo_Class="batch")
    assert seen[0].slo.name == "batch"
    sent, _, _ = await ask(kind="websocket", X_Slo_Class="god")
    assert sent[0]["type"] == "websocket.close"


def test_of_two_keys_the_one_counts_that_was_checked() -> None:
    headers = [(b"authorization", b"Bearer checked"), (b"Authorization", b"Bearer made-up")]
    assert said_by_headers(headers) == ("", "checked")
    assert Headers(raw=[(name.lower(), value) for name, value in headers]).get("Authorization") == "Bearer checked"
    assert said_by_headers([(b"authorization", b"Basic x"), *headers]) == ("", "")
