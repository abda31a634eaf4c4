"""What a file about several models may say, and how it is told what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.models.models_file import Models, check_access, check_models, is_models_file, load_models
from cluster.preflight.machine import Machine
from cluster.preflight.problems import ConfigError

MACHINE = Machine(cores=(0, 1), memory_free_bytes=64 << 30)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str, *overrides: str) -> Models:
    return load_models(written(tmp_path, text), overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    (only,) = problems(tmp_path, text, *overrides)
    return only


def test_the_field_models_tells_such_a_file_from_a_clusters(tmp_path: Path) -> None:
    assert is_models_file(written(tmp_path, "models: {}"))
    for text in ("model: /m\n", "", "[]", "models: [\n"):
        assert not is_models_file(written(tmp_path, text))
    assert not is_models_file(tmp_path / "nowhere.yaml")


def test_a_model_is_served_under_its_name_by_a_cluster_of_its_own(tmp_path: Path) -> None:
    models = load(tmp_path, "models: {org/a: {cluster: {model: /m, pools: {decode: {replicas: 2}}}}, b: {}}")
    first, second = models.specs
    assert (first.name, first.cluster.served_model_name, first.tree["served_model_name"]) == ("org/a", "org/a", "org/a")
    assert first.cluster.pools.decode.replicas == 2
    assert (second.config.policy, second.cluster.model) == ("pinned", None)


def test_a_cluster_may_stand_in_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: /m\n")
    models = load(tmp_path, "models: {a: {config: one.yaml, policy: on_demand}}")
    assert models.specs[0].cluster.model == "/m"
    (tmp_path / "one.yaml").write_text("modle: /m\n")
    assert problem(tmp_path, "models: {a: {config: one.yaml}}").startswith(
        f"{tmp_path}/one.yaml: modle: unknown field. Did you mean model?"
    )


def test_overrides_reach_every_part(tmp_path: Path) -> None:
    text = "models: {a: {cluster: {model: /m}}}"
    models = load(tmp_path, text, "capacity=3", "server.port=9000", "models.a.cost=2", "models.a.cluster.slo.ttft_s=1")
    assert (models.config.capacity, models.config.server.port) == (3, 9000)
    assert (models.specs[0].config.cost, models.specs[0].cluster.slo.ttft_s) == (2, 1.0)


def test_further_names_come_from_classes_and_adapters(tmp_path: Path) -> None:
    cluster = "{slo: {classes: {batch: {models: [a-batch, a]}}}, server: {options: {lora_modules: [{name: a-lora}]}}}"
    models = load(tmp_path, f"models: {{a: {{cluster: {cluster}}}}}")
    assert models.specs[0].aliases == ["a-batch", "a-lora"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: {a: {polcy: pinned}}", "models.a.polcy: unknown field. Did you mean policy?"),
        ("models: {a: {policy: always}}", "models.a.policy: found 'always'. Use one of 'pinned'"),
        ("models: {a: {cluster: {slo: {ttft_s: -1}}}}", "models.a.cluster.slo.ttft_s: found -1"),
        ("models: {a: {cluster: {pool: {}}}}", "models.a.cluster.pool: unknown field. Did you mean pools?"),
        ("models: {a: {cluster: {model: m}, config: f}}", "models.a: config and cluster are both given."),
        ("models: {a: {config: nowhere.yaml}}", "nowhere.yaml: No such file"),
        ("models: {a: {cluster: {served_model_name: b}}}", "models.a.cluster.served_model_name: found 'b'"),
        ("models: {a: {cluster: {server: {port: 80}}}}", "models.a.cluster.server.port: the model is reached through"),
        ("models: {a: {cluster: {server: {options: {uds: /s}}}}}", "models.a.cluster.server.options.uds: the model"),
        ("models: {a: {cost: 2}}\ncapacity: 1", "capacity: found 1, and the pinned models take 2."),
        (
            "models: {a: {cost: 2}, b: {cost: 3, policy: on_demand}}\ncapacity: 4",
            "models.b.cost: found 3; of capacity=4, pinned models leave 2.",
        ),
        (
            "models: {a: {cluster: {slo: {classes: {x: {models: b}}}}}, b: {}}",
            "models.a: it is also served as 'b', and so is b.",
        ),
        ("models: {a: {}}\nserver: {ssl_keyfile: k}", "server: ssl_certfile and ssl_keyfile belong together."),
        ("models: {a: {}}\ncapactiy: 1", "capactiy: unknown field. Did you mean capacity?"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    assert told in problem(tmp_path, text)


@pytest.mark.parametrize("name", ["", "a b", "../a", "a//b", "/a", "a/", "a" * 129])
def test_a_name_can_stand_in_a_path(tmp_path: Path, name: str) -> None:
    assert problem(tmp_path, f"models: {{'{name}': {{}}}}").startswith("models.")


def test_keys_are_never_shown(tmp_path: Path) -> None:
    assert "sesame" not in "".join(problems(tmp_path, "models: {}\nserver: {api_key: [[sesame]], admin_key: ''}"))


@pytest.mark.parametrize(
    ("server", "environ", "may"),
    [
        ("{}", {}, True),
        ("{host: 0.0.0.0}", {}, False),
        ("{host: 0.0.0.0, admin_key: k}", {}, False),
        ("{host: 0.0.0.0, api_key: k}", {}, True),
        ("{host: 0.0.0.0}", {"VLLM_API_KEY": "k"}, True),
        ("{host: 0.0.0.0, open_to_all: true}", {}, True),
    ],
)
def test_others_need_a_key(tmp_path: Path, server: str, environ: dict[str, str], may: bool) -> None:
    config = load(tmp_path, f"models: {{}}\nserver: {server}").config
    if may:
        check_access(config.server, environ)
    else:
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            check_access(config.server, environ)


def test_every_model_is_checked_as_if_it_were_alone(tmp_path: Path) -> None:
    text = "models: {a: {cluster: {engine: {no_such_option: 1}}}, b: {cluster: {engine: simulated}}}"
    models = load(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        check_models(models.specs, MACHINE)
    assert [problem.field for problem in caught.value.problems] == ["models.a.cluster.engine.no_such_option"]
    (plans,) = check_models(models.specs[1:], MACHINE).values()
    assert [plan.worker_id for plan in plans] == ["prefill-0", "decode-0"]


def test_a_model_is_checked_against_the_gpus_that_it_will_see(tmp_path: Path) -> None:
    text = "models: {a: {env: {CUDA_VISIBLE_DEVICES: '2, 3'}}}"
    machine = replace(MACHINE, gpus=("0", "1", "2", "3"))
    plans = check_models(load(tmp_path, text).specs, machine)["a"]
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["2", "3"]


def test_a_model_that_sleeps_has_engines_that_can(tmp_path: Path) -> None:
    terms = "policy: on_demand, sleep: true"
    models = load(tmp_path, f"models: {{a: {{{terms}, cluster: {{model: /m, engine: {{dtype: auto}}}}}}}}")
    assert models.specs[0].cluster.engine == {"enable_sleep_mode": True, "dtype": "auto"}
    with pytest.raises(ConfigError) as caught:
        check_models(models.specs, MACHINE)
    assert str(caught.value).startswith("models.a.sleep: its engines compute on CPUs, and vLLM's engines can sleep on")
    simulated = load(tmp_path, f"models: {{a: {{{terms}, cluster: {{engine: simulated}}}}}}")
    assert check_models(simulated.specs, MACHINE)["a"]
    assert "a pinned model is always up. Set policy=on_demand" in problem(tmp_path, "models: {a: {sleep: true}}")
