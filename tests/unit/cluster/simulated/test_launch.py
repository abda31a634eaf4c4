import asyncio
import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import ClusterConfig, SimulationConfig
from cluster.fleet.fleet import Fleet, WorkerDown
from cluster.launch.local import LocalLauncher, WorkerExit
from cluster.preflight.config_file import load_config
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError
from cluster.simulated.engine.vocabulary import word_tokens
from cluster.simulated.launch import (
    SimulatedPlanner,
    is_simulated,
    simulated_commands,
    simulated_in_role,
    simulation_problems,
)
from cluster.simulated.settings import read_simulated_settings
from cluster.status import ClusterStatus, WorkerStatus
from cluster.terminal.status_tables import status_tables

FACTS = ModelFacts(30, 9, 3, 64, 8192, 0)


def simulated(*overrides: str) -> ClusterConfig:
    return load_config(None, ["engine=simulated", *overrides])


def test_the_word_simulated_in_place_of_engine_options_switches_the_simulation_on() -> None:
    config = simulated("simulation.seed=3")
    assert (config.simulation.enabled, config.simulation.seed, config.engine) == (True, 3, {})
    assert ClusterConfig.model_validate(config.model_dump()) == config
    assert not load_config(None).simulation.enabled


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["simulation.seed=3"], "the engines are real"),
        (
            ["engine=simulated", "pools.decode.engine.max_num_seqs=3"],
            "found some in pools.decode.engine",
        ),
        (["engine=simulated", "simulation.speed=warp"], "simulation.speed"),
        (["engine=simulated", "simulation=fast"], "simulation"),
        (["engine=imaginary"], "engine"),
    ],
)
def test_half_a_simulation_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert any(sentence in str(problem) for problem in caught.value.problems)


def test_what_a_simulated_worker_cannot_do_is_a_problem() -> None:
    config = simulated(
        "pools.prefill.tensor_parallel=2",
        "pools.decode.env.A=1",
        "simulation.num_blocks=4",
        "simulation.max_model_len=99",
    )
    assert [problem.field for problem in simulation_problems(config)] == [
        "pools.prefill.tensor_parallel",
        "pools.decode.env",
        "simulation.max_model_len",
    ]


def test_workers_share_processes_as_many_as_are_asked_for(tmp_path: Path) -> None:
    config = simulated("pools.prefill.replicas=3", "pools.decode.replicas=2", "simulation.workers_per_process=4")
    commands = simulated_commands(SimulatedPlanner(config).first(), config, "m", FACTS, tmp_path, {"A": "1"})
    assert [[worker_id for worker_id, _ in command.workers] for command in commands] == [
        ["prefill-0", "prefill-1", "prefill-2", "decode-0"],
        ["decode-1"],
    ]
    settings = read_simulated_settings(Path(commands[0].argv[-1]))
    assert (settings.name, settings.max_model_len, settings.workers[3].role) == ("simulated-0", 8192, "decode")
    assert read_simulated_settings(Path(commands[1].argv[-1])).name == "decode-1"


def test_answers_are_made_of_the_tokenizers_words(tmp_path: Path) -> None:
    assert len(word_tokens(tmp_path)) > 100
    vocabulary = {"Ġthe": 5, "Ġcat": 9, "Ġx": 6, "dog": 7, "ĠCat": 8, "<eos>": 2}
    assert word_tokens(_tokenizer(tmp_path / "words", vocabulary)) == (5, 9)
    assert word_tokens(_tokenizer(tmp_path / "pieces", [["▁the", -1.0], ["x", -2.0]])) == (0,)


def _tokenizer(directory: Path, vocabulary: object) -> Path:
    """A model's directory; what is in one is read once."""
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return directory


def test_a_worker_that_took_another_role_is_started_again_in_it(tmp_path: Path) -> None:
    config = simulated("pools.decode.replicas=2")
    (command,) = simulated_commands(SimulatedPlanner(config).first(), config, "m", FACTS, tmp_path, {})
    assert is_simulated(command)
    changed = simulated_in_role(command, "decode-1", "prefill")
    roles = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "prefill")]
    assert changed.workers == roles
    settings = read_simulated_settings(Path(changed.argv[-1]))
    assert [(name.worker_id, name.role) for name in settings.workers] == roles


async def test_all_workers_of_a_killed_process_come_back_together(tmp_path: Path) -> None:
    downs: list[WorkerDown] = []
    fleet = Fleet("on_failure", downs.append)
    config = simulated("pools.decode.replicas=2")
    (command,) = simulated_commands(SimulatedPlanner(config).first(), config, "m", FACTS, tmp_path, dict(os.environ))
    await fleet.start([command])
    fleet.serve()
    first = fleet.launcher.groups["decode-1"]
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(10):
        while set(fleet.launcher.groups.values()) in ({first}, set()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [(down.worker_id, down.returns) for down in downs] == [(w, True) for w, _ in command.workers]
    assert len(set(fleet.launcher.groups.values())) == 1
    assert not fleet.knows("decode-1"), "nobody starts one of them again alone"
    fleet.keep_down("decode-1")  # which says nothing about the others
    await fleet.stop(1)


async def test_a_killed_process_is_the_end_of_every_worker_in_it(tmp_path: Path) -> None:
    exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
    launcher = LocalLauncher(exits.put_nowait)
    config = simulated()
    (command,) = simulated_commands(SimulatedPlanner(config).first(), config, "m", FACTS, tmp_path, dict(os.environ))
    await launcher.start([command])
    assert set(launcher.groups) == {"prefill-0", "decode-0"}
    try:
        os.kill(launcher.groups["decode-0"], signal.SIGKILL)
        told = [await asyncio.wait_for(exits.get(), 10) for _ in range(2)]
        assert [(exit_.worker_id, exit_.role) for exit_ in told] == [("prefill-0", "prefill"), ("decode-0", "decode")]
        assert "worker decode-0 was killed by SIGKILL" in told[1].cause
    finally:
        await launcher.stop(1)
    assert dict(launcher.groups) == {}


def test_the_status_says_what_is_simulated() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    workers = [WorkerStatus("decode-0", "decode", "ready", simulated=True), WorkerStatus("decode-1", "decode", "ready")]
    console.print(status_tables(ClusterStatus("m", workers=workers)))
    assert "1 of 2 workers are SIMULATED" in console.export_text()


def test_every_cost_has_a_description() -> None:
    assert all(field.description for field in SimulationConfig.model_fields.values())
