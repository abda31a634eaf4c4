"""For which model a request is."""

import pytest

from proxy.models.answers import Refused
from proxy.models.routing import Target, find_target

LISTED = ["llama", "org/model", "org/model/chat"]
NAMES = {**{name: name for name in LISTED}, "llama-batch": "llama"}
JSON = "application/json"
DEEP = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "llama"}'
BODIES_WITHOUT_A_NAME = [
    *(b"", b"{}", b"not json", b'{"model": 7}', b'{"model": null}', b'{"model": "\xff"}', b"[]"),
    pytest.param(DEEP, id="deep"),
]


def target(
    path: str = "/v1/completions",
    body: bytes = b"",
    content_type: str = JSON,
    method: str = "POST",
    listed: list[str] | None = None,
) -> Target | Refused:
    return find_target(method, path, content_type, body, LISTED if listed is None else listed, NAMES)


def refused(answer: Target | Refused) -> tuple[int, str]:
    assert isinstance(answer, Refused)
    return answer.status, answer.reason


@pytest.mark.parametrize(("asked", "meant"), [("llama", "llama"), ("llama-batch", "llama"), ("org/model", "org/model")])
def test_the_body_names_the_model(asked: str, meant: str) -> None:
    body = f'{{"messages": [{{"model": "other"}}], "model": "{asked}"}}'.encode()
    assert target(body=body) == Target(meant, "/v1/completions", observes=False)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", ""])
def test_json_is_read_however_its_type_is_spelled(content_type: str) -> None:
    assert isinstance(target(body=b'{"model": "llama"}', content_type=content_type), Target)


def test_an_unknown_model_is_a_404() -> None:
    assert refused(target(body=b'{"model": "gpt"}')) == (404, "unknown_model")


@pytest.mark.parametrize("body", BODIES_WITHOUT_A_NAME)
def test_without_a_name_it_must_be_the_only_model(body: bytes) -> None:
    assert refused(target(body=body)) == (400, "no_model_named")
    assert target(body=body, listed=["llama"]) == Target("llama", "/v1/completions", observes=False)
    assert refused(target(body=body, listed=[])) == (400, "no_model_named")


def test_a_form_is_not_read() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nllama\r\n--x--'
    assert refused(target("/v1/audio/transcriptions", form, "multipart/form-data; boundary=x"))[0] == 400


@pytest.mark.parametrize(
    ("path", "model", "rest"),
    [
        ("/models/llama/v1/audio/transcriptions", "llama", "/v1/audio/transcriptions"),
        ("/models/org/model/metrics", "org/model", "/metrics"),
        ("/models/org/model/chat/metrics", "org/model/chat", "/metrics"),
        ("/models/org%2Fmodel/v1/responses/a%2Fb", "org/model", "/v1/responses/a%2Fb"),
        ("/models/org%2fmodel/chat/metrics", "org/model/chat", "/metrics"),
        ("/models/org/model/../llama/metrics", "org/model", "/../llama/metrics"),
    ],
)
def test_the_path_may_name_the_model_instead(path: str, model: str, rest: str) -> None:
    assert target(path, b'{"model": "other"}') == Target(model, rest, observes=False)


@pytest.mark.parametrize("path", ["/models/gpt/metrics", "/models/llama", "/models/llama-batch/metrics", "/models/"])
def test_a_path_that_names_no_model_is_a_404(path: str) -> None:
    assert refused(target(path)) == (404, "unknown_model")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/models/llama/metrics"),
        ("HEAD", "/models/llama/health"),
        ("POST", "/models/llama/twinpool/workers/decode-0/drain"),
    ],
)
def test_looking_at_a_model_is_no_reason_to_start_it(method: str, path: str) -> None:
    answer = target(path, method=method)
    assert isinstance(answer, Target)
    assert answer.observes
