"""The class of a request: the header's, else the key's, else the model's, else the default."""

import hashlib
from math import inf
from typing import Any

import pytest

from cluster.configuration.slo import SloConfig
from proxy.scheduling.slo import SloClass
from proxy.slo.rules import ClassOfOthers, SloRules, UnknownClass

CONFIG: dict[str, Any] = {
    "ttft_s": 2.0,
    "itl_s": 0.05,
    "classes": {
        "gold": {"ttft_s": 0.5, "on_overload": "reject", "priority": -5, "api_keys": ["key-1", "key-2"]},
        "batch": {"itl_s": 1.0, "on_overload": "demote", "priority": 5, "models": ["tiny-batch"]},
        "chat": {},
    },
}
RULES = SloRules(SloConfig.model_validate(CONFIG))


def class_of(**said: str) -> str:
    return RULES.standing(**said).slo.name


def test_what_a_class_leaves_out_is_as_in_the_default() -> None:
    assert dict(RULES.classes) == {
        "default": SloClass("default", 2.0, 0.05, "demote", longest_step_s=0.25),
        "gold": SloClass("gold", 0.5, 0.05, "reject"),
        "batch": SloClass("batch", 2.0, 1.0, "demote", longest_step_s=0.25),
        "chat": SloClass("chat", 2.0, 0.05, "demote", longest_step_s=0.25),
    }


def test_one_class_alone_yields_to_nobody() -> None:
    assert SloRules(SloConfig()).classes["default"].longest_step_s == inf


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({}, "default"),
        ({"api_key": "unknown"}, "default"),
        ({"model": "tiny"}, "default"),
        ({"model": "tiny-batch"}, "batch"),
        ({"api_key": "key-2", "model": "tiny-batch"}, "gold"),
        ({"api_key": "key-2", "header": "chat"}, "chat"),
        ({"api_key": "key-1", "header": "gold"}, "gold"),
        ({"model": "tiny-batch", "header": "default"}, "default"),
    ],
)
def test_the_header_wins_over_the_key_and_the_key_over_the_model(said: dict[str, str], name: str) -> None:
    assert class_of(**said) == name


def test_an_unknown_class_is_refused_with_the_names_one_may_use() -> None:
    with pytest.raises(UnknownClass, match=r"'god', but there is no such class; use one of: default, batch, chat$"):
        class_of(header="god")
    with pytest.raises(UnknownClass, match=r"use one of: default, gold, batch, chat$"):
        class_of(header="god", api_key="key-1")


def test_a_class_with_keys_is_for_these_keys_only() -> None:
    with pytest.raises(ClassOfOthers, match="a class for API keys of its own"):
        class_of(header="gold", api_key="another")


def test_a_tenant_is_a_digest_and_never_the_key() -> None:
    standing = RULES.standing(api_key="key-1")
    assert standing.tenant == hashlib.sha256(b"key-1").hexdigest()[:16]
    assert standing.priority == -5
    assert RULES.standing().tenant == ""
    assert "key-1" not in repr(vars(RULES)) + repr(standing)


def test_the_body_is_only_read_if_a_models_name_can_decide() -> None:
    assert RULES.needs_model
    assert not SloRules(SloConfig()).needs_model
