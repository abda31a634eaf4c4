"""Processes that play clusters are started, watched and ended."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.launch import watchdog
from cluster.launch.local import WorkerCommand
from cluster.models.config import ModelConfig
from cluster.models.models_file import ModelSpec, read_model
from proxy.models import children as children_module
from proxy.models.children import Child, Children

DUMMY = Path(__file__).with_name("dummy_cluster.py")


class DummyChildren(Children):
    """The real thing, but for what it runs."""

    commands: list[WorkerCommand]

    def _command(self, child: Child) -> WorkerCommand:
        command = super()._command(child)
        self.commands.append(command)
        return replace(command, argv=(sys.executable, "-I", "-S", str(DUMMY), command.argv[-1]))


@dataclass
class Watched:
    """Children, and what they told."""

    directory: Path
    told: "asyncio.Queue[tuple[str, ...]]" = field(default_factory=asyncio.Queue)
    failures: list[BaseException] = field(default_factory=list)

    def make(self, silent_after_s: float = 60.0) -> "Watched":
        self.children = DummyChildren(
            self.directory,
            {**os.environ, "VLLM_API_KEY": "of-the-front"},
            lambda name, _took_s: self.told.put_nowait(("up", name)),
            lambda name, cause: self.told.put_nowait(("down", name, cause)),
            self.failures.append,
            silent_after_s,
            lambda name, _took_s: self.told.put_nowait(("asleep", name)),
            lambda name, _took_s: self.told.put_nowait(("woken", name)),
            lambda name, cause: self.told.put_nowait(("stuck", name, cause)),
        )
        self.children.commands = []
        return self

    async def next(self) -> tuple[str, ...]:
        return await asyncio.wait_for(self.told.get(), 30)

    def pid(self, name: str) -> int:
        return self.children.launcher.groups[name]


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(children_module, "_AFTER_A_KILL_S", 0.0)
    monkeypatch.setattr(children_module, "_POLL_S", 0.02)
    watched = Watched(tmp_path)
    yield watched
    await watched.children.close(5.0)
    assert watched.failures == []


def spec(name: str, what: str = "serve", **cluster: Any) -> ModelSpec:
    return read_model(name, ModelConfig(cluster={"model": what, **cluster}, env={"MARK": "7"}), Path())


async def test_a_model_is_up_when_it_answers_and_gone_when_it_was_stopped(watched: Watched) -> None:
    children = watched.make().children
    children.start(spec("org/alpha"))
    assert await watched.next() == ("up", "org/alpha")
    child = children.find("org/alpha")
    assert child is not None
    async with child.session.get("http://model/anything") as response:
        assert response.status == 200
    group = watched.pid("org/alpha")
    children.stop("org/alpha")
    assert (await watched.next())[:2] == ("down", "org/alpha")
    assert watchdog.members(group) == []
    assert children.find("org/alpha") is None
    assert not child.socket.exists()
    children.start(spec("org/alpha"))  # and once more
    assert await watched.next() == ("up", "org/alpha")


async def test_a_cluster_gets_its_own_configuration_and_environment(watched: Watched) -> None:
    children = watched.make().children
    children.start(spec("alpha", pools={"decode": {"replicas": 2}}, server={"options": {"api_key": "k"}}))
    await watched.next()
    (command,) = children.commands
    path = Path(command.argv[-1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    child = children.find("alpha")
    assert child is not None
    assert yaml.safe_load(path.read_text()) == {
        "model": "serve",
        "served_model_name": "alpha",
        "pools": {"decode": {"replicas": 2}},
        "server": {"options": {"api_key": "k", "uds": str(child.socket)}},
    }
    assert command.env["MARK"] == "7"
    assert "VLLM_API_KEY" not in command.env


async def test_a_cluster_that_does_not_start_says_why(watched: Watched) -> None:
    watched.make().children.start(spec("alpha", "die"))
    assert await watched.next() == (
        "down",
        "alpha",
        "the configuration cannot be used: model: it died. Repair it.",
    )


async def test_a_cluster_that_is_killed_is_noticed_at_once(watched: Watched) -> None:
    watched.make().children.start(spec("alpha"))
    assert await watched.next() == ("up", "alpha")
    os.kill(watched.pid("alpha"), signal.SIGKILL)
    told = await watched.next()
    assert told[:2] == ("down", "alpha")
    assert "SIGKILL" in told[2]


async def test_a_silent_cluster_is_killed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "_HEALTH_TIMEOUT_S", 0.5)
    children = watched.make(silent_after_s=0.5).children
    children.start(spec("alpha"))
    assert await watched.next() == ("up", "alpha")
    os.kill(watched.pid("alpha"), signal.SIGSTOP)
    told = await watched.next()
    assert told[:2] == ("down", "alpha")
    assert "silent" in told[2]


async def test_what_cannot_be_started_ends_only_itself_and_leaves_no_keys_behind(watched: Watched) -> None:
    children = watched.make().children
    unusable = spec("alpha")
    unusable.config.env["A=B"] = "1"  # the configuration refuses it
    children.start(unusable)
    assert (await watched.next())[:2] == ("down", "alpha")
    assert list(watched.directory.glob("model-*")) == []
    children.start(spec("beta"))
    assert await watched.next() == ("up", "beta")


async def test_one_that_is_stopped_while_it_is_being_started_is_gone_too(watched: Watched) -> None:
    children = watched.make().children
    children.start(spec("alpha", "hang"))
    children.stop("alpha")
    assert (await watched.next())[:2] == ("down", "alpha")
    assert dict(children.launcher.groups) == {}


async def test_closing_leaves_nothing_behind(watched: Watched) -> None:
    children = watched.make().children
    for name, what in (("alpha", "serve"), ("beta", "hang")):
        children.start(spec(name, what))
    assert await watched.next() == ("up", "alpha")
    groups = list(children.launcher.groups.values())
    await children.close(5.0)
    assert [watchdog.members(group) for group in groups] == [[], []]


async def test_a_model_is_told_to_sleep_and_to_wake_with_its_own_key(watched: Watched) -> None:
    children = watched.make().children
    children.start(spec("alpha", server={"options": {"api_key": "k"}}))
    assert await watched.next() == ("up", "alpha")
    children.sleep("alpha")
    assert await watched.next() == ("asleep", "alpha")
    children.wake("alpha")
    assert await watched.next() == ("woken", "alpha")


async def test_a_model_that_does_not_sleep_says_why_and_one_that_has_ended_is_told_of_once(watched: Watched) -> None:
    children = watched.make().children
    children.start(spec("alpha", "insomniac", server={"options": {"api_key": "k"}}))
    assert await watched.next() == ("up", "alpha")
    children.sleep("alpha")
    assert await watched.next() == ("stuck", "alpha", "it could not sleep: a transfer is open")
    children.stop("alpha")
    children.wake("alpha")
    assert (await watched.next())[:2] == ("down", "alpha")
    assert watched.told.empty()
