from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.preflight.config_file import load_config
from cluster.preflight.problems import ConfigError, Problem


def problems_of(*overrides: str, file: Path | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value.problems


def problem_of(*overrides: str, file: Path | None = None) -> Problem:
    problems = problems_of(*overrides, file=file)
    assert len(problems) == 1, problems
    return problems[0]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_without_a_file_there_is_one_worker_of_each_role() -> None:
    config = load_config(None)
    assert config == ClusterConfig()
    assert (config.pools.prefill.replicas, config.pools.decode.replicas) == (1, 1)
    assert config.model is None


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "pools: {decode: {replicas: 3, tensor_parallel: 2}}\nslo: {ttft_s: 1}\n")
    config = load_config(path, ["pools.decode.replicas=2", "server.options.api_key=sesame"])
    assert (config.pools.decode.replicas, config.pools.decode.tensor_parallel) == (2, 2)
    assert config.slo.ttft_s == 1.0
    assert config.server.options == {"api_key": "sesame"}


def test_an_override_may_hold_any_yaml_value() -> None:
    config = load_config(None, ["transfer.links=[zmq]", "engine.enforce_eager=true", "engine.hf_overrides={a: 1}"])
    assert config.transfer.links == ["zmq"]
    assert config.engine == {"enforce_eager": True, "hf_overrides": {"a": 1}}


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing yet\n")) == ClusterConfig()


def test_numbers_in_env_become_text() -> None:
    assert load_config(None, ["pools.decode.env.CUDA_VISIBLE_DEVICES=0"]).pools.decode.env == {
        "CUDA_VISIBLE_DEVICES": "0"
    }


@pytest.mark.parametrize("name", ['"A=B"', '""', '"A\\0"'])
def test_what_no_process_can_have_in_its_environment_is_refused(tmp_path: Path, name: str) -> None:
    problem = problem_of(file=written(tmp_path, f"pools: {{decode: {{env: {{{name}: x}}}}}}"))
    assert problem.field == "pools.decode.env"
    assert "cannot be set" in problem.what


@pytest.mark.parametrize(
    ("text", "fault"),
    [("? [1, 2]\n: 3\n", "unhashable key in line 1"), ("served_model_name: 2024-13-45\n", "month must be in 1..12")],
)
def test_yaml_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in problem_of(file=written(tmp_path, text)).what


def test_an_override_that_looks_like_a_date_and_is_none_is_told_too() -> None:
    assert "month must be in 1..12" in problem_of("served_model_name=2024-13-45").what


@pytest.mark.parametrize(
    ("override", "field", "guess"),
    [
        ("pools.decod.replicas=2", "pools.decod", "decode"),
        ("pools.decode.replica=2", "pools.decode.replica", "replicas"),
        ("sched.reserve=x", "sched", "Known here"),
        ("transfer.lnks=[zmq]", "transfer.lnks", "links"),
        ("slo.ttft=1", "slo.ttft", "ttft_s"),
    ],
)
def test_an_unknown_field_is_named_with_the_one_that_was_meant(override: str, field: str, guess: str) -> None:
    problem = problem_of(override)
    assert problem.field == field
    assert "unknown field" in problem.what
    assert guess in problem.remedy


@pytest.mark.parametrize(
    ("override", "field", "found"),
    [
        ("server.port=99999", "server.port", "99999"),
        ("server.port=x", "server.port", "'x'"),
        ("pools.prefill.replicas=-1", "pools.prefill.replicas", "-1"),
        ("transfer.links=[pigeon]", "transfer.links.0", "pigeon"),
        ("transfer.links=[]", "transfer.links", "[]"),
        ("transfer.announce_layers=-1", "transfer.announce_layers", "-1"),
        ("scheduling.remote_prefill_min_tokens=0", "scheduling.remote_prefill_min_tokens", "0"),
        ("scheduling.on_no_prefill=wait", "scheduling.on_no_prefill", "wait"),
        ("engine=3", "engine", "3"),
        ("pools=3", "pools", "3"),
        ("model=[1]", "model", "[1]"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(override: str, field: str, found: str) -> None:
    problem = problem_of(override)
    assert problem.field == field
    assert found in problem.what
    assert problem.remedy


def test_a_field_that_may_be_a_number_or_a_word_is_reported_once() -> None:
    problem = problem_of("scheduling.remote_prefill_min_tokens=foo")
    assert "auto" in problem.remedy


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["transfer.beat_s=40"], ["beat_s", "lease_first_s"]),
        (["transfer.peer_heartbeat_s=6"], ["peer_heartbeat_s", "peer_lost_after_s"]),
        (["liveness.heartbeat_s=9"], ["heartbeat_s", "dead_after_s"]),
        (["pools.decode.replicas=0"], ["pools.decode.replicas"]),
    ],
)
def test_fields_that_contradict_each_other_are_both_named(overrides: list[str], names: list[str]) -> None:
    text = str(problem_of(*overrides))
    assert all(name in text for name in names), text


def test_every_problem_is_reported_at_once() -> None:
    assert {problem.field for problem in problems_of("server.port=x", "slo.x=1", "pools=3")} == {
        "server.port",
        "slo.x",
        "pools",
    }


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.yaml" in problem_of(file=tmp_path / "none.yaml").what


def test_broken_yaml_is_reported_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in problem_of(file=written(tmp_path, "pools:\n  decode: 1: 2\n")).what


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    problem = problem_of(file=written(tmp_path, "slo: {ttft_s: 1}\nslo: {itl_s: 1}\n"))
    assert "'slo' is given twice" in problem.what


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    assert "list" in problem_of(file=written(tmp_path, "- a\n")).what


@pytest.mark.parametrize("override", ["replicas", "=3", "pools..x=1", ".=1"])
def test_an_override_without_field_or_value_is_refused(override: str) -> None:
    assert override in problem_of(override).what


def test_an_override_below_a_plain_value_is_refused() -> None:
    assert problem_of("server.port=3", "server.port.x=1").field == "server.port"


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ("{gold: {api_keys: 12345}, b: {api_keys: ['12345']}}", "slo: a key is given twice, in slo.classes.gold."),
        ("{gold: {api_keys: {x: 12345}}}", "slo.classes.gold.api_keys.0: found a secret;"),
        ("{a: {models: [m]}, b: {models: m}}", "slo: 'm' is given twice, in slo.classes.a.models and in slo."),
        ("{default: {}}", "slo: the class name 'default' is taken, its targets are slo.ttft_s and slo.itl_s. Choose"),
        ("{a b: {}}", "slo.classes.a b"),
        ("{gold: {ttft: 1}}", "slo.classes.gold.ttft: unknown field. Did you mean ttft_s?"),
        ("{gold: {on_overload: wait}}", "slo.classes.gold.on_overload: found 'wait'. Use one of 'queue', 'demote' or"),
    ],
)
def test_what_is_wrong_with_a_class_is_told_without_its_keys(classes: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"slo.classes={classes}"])
    problem = str(caught.value.problems[0])
    assert problem.startswith(told)
    assert "12345" not in problem


def test_keys_do_not_show_when_the_configuration_does() -> None:
    config = load_config(None, ["slo.classes={gold: {api_keys: hunter2}}"])
    assert config.slo.classes["gold"].api_keys[0].get_secret_value() == "hunter2"
    assert "hunter2" not in repr(config) + str(config.model_dump())
