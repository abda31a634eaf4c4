"""vLLM's own options, by vLLM's own names."""

from typing import Any

import pytest

from cluster.config import ClusterConfig
from proxy.frontend.vllm_arguments import STATUS_LINE, TRANSFER_PARAMS_GUARD, ServerOptionError, server_arguments


def arguments(**config: Any) -> Any:
    return server_arguments(ClusterConfig.model_validate(config), "/models/tiny")[0]


def test_frontend_flags_are_converted_by_vllms_own_parser() -> None:
    args = arguments(
        server={
            "host": "0.0.0.0",
            "port": 9000,
            "options": {
                "api_key": ["one", "two"],
                "allowed_origins": ["https://example.org"],
                "default_chat_template_kwargs": {"enable_thinking": False},
                "enable_log_deltas": False,
                "enable_prompt_tokens_details": True,
                "enable_force_include_usage": False,
                "chat_template": None,
                "max_log_len": 10,
                "lora_modules": [{"name": "a", "path": "/b"}],
                "middleware": ["my.Middleware", "your.Middleware"],
            },
        }
    )
    assert (args.host, args.port) == ("0.0.0.0", 9000)
    assert args.api_key == ["one", "two"]
    assert args.allowed_origins == ["https://example.org"]
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert args.enable_log_deltas is False
    assert args.enable_prompt_tokens_details is True
    assert args.enable_force_include_usage is False
    assert args.max_log_len == 10
    assert [(m.name, m.path) for m in args.lora_modules] == [("a", "/b")]
    assert args.middleware == ["my.Middleware", "your.Middleware", TRANSFER_PARAMS_GUARD, STATUS_LINE], (
        "ours are outermost"
    )


def test_one_api_key_may_be_given_as_text() -> None:
    assert arguments(server={"options": {"api_key": "secret"}}).api_key == ["secret"]


def test_engine_options_are_those_of_the_workers() -> None:
    args = arguments(engine={"max_model_len": 128, "dtype": "float32", "compilation_config": {"mode": 0}})
    assert (args.max_model_len, args.dtype) == (128, "float32")
    assert type(args.compilation_config).__name__ == "CompilationConfig"


def test_what_only_workers_need_is_left_out() -> None:
    assert arguments(engine={"tensor_parallel_size": 8}).tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ["SmolLM2-135M-Instruct"]),
        ({"model": "org/model"}, ["org/model"]),
        ({"model": "org/model", "served_model_name": "mine"}, ["mine"]),
        (
            {
                "served_model_name": "mine",
                "slo": {"classes": {"a": {"models": ["mine-fast", "adapter"]}, "b": {"models": "mine"}}},
                "server": {"options": {"lora_modules": [{"name": "adapter", "path": "/b"}]}},
            },
            ["mine", "mine-fast"],
        ),
    ],
)
def test_the_model_is_served_under_its_own_name_and_those_of_classes(config: Any, names: list[str]) -> None:
    assert arguments(**config).served_model_name == names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"server": {"options": {"no_flag": 1}}}, r"server.options.no_flag is not a flag"),
        ({"server": {"options": {"max_log_len": "many"}}}, "max-log-len"),
        ({"server": {"options": {"uvicorn_log_level": "loud"}}}, "uvicorn-log-level"),
        ({"engine": {"no_option": 1}}, r"engine.no_option is not an engine option"),
        ({"server": {"options": {"enable_log_outputs": True}}}, "enable-log-requests"),
        ({"server": {"options": {"enable_auto_tool_choice": True, "tool_call_parser": "nope"}}}, "nope"),
    ],
)
def test_an_option_that_is_wrong_is_named(config: Any, message: str) -> None:
    with pytest.raises(ServerOptionError, match=message):
        arguments(**config)


def test_it_is_quiet_unless_told_otherwise() -> None:
    assert arguments().disable_uvicorn_access_log is True
    loud = arguments(server={"options": {"disable_uvicorn_access_log": False, "uvicorn_log_level": "info"}})
    assert loud.disable_uvicorn_access_log is False
    assert loud.uvicorn_log_level == "info"
