"""Several front ends over one dispatcher, each behind a real socket, on fake workers."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache import factories

from cluster.config import LivenessConfig
from cluster.status import LaunchNote
from proxy.adapters.adapter import Adapter
from proxy.api_servers import messages
from proxy.api_servers import vllm_hub as hub_module
from proxy.api_servers.accept_loads import NOT_ACCEPTING, create_loads, open_loads
from proxy.api_servers.control import ControlForward
from proxy.api_servers.link import DispatcherLink, DispatcherLost
from proxy.api_servers.vllm_hub import ApiServerHub
from proxy.api_servers.vllm_remote_client import RemoteClient
from proxy.frontend.vllm_first_server import engine_facts
from proxy.metrics import ProxyMetrics
from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.scheduling.slo import DEFAULT_STANDING, SloClass, Standing
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, MiniFrontEnd, mini_cluster, read, until

NAMES = ("api-server-1", "api-server-2")
LIVENESS = LivenessConfig(heartbeat_s=0.02, dead_after_s=0.1, proxy_lost_after_s=5)


class Remote(MiniFrontEnd):
    """A further API server process, without a process and without HTTP."""

    def __init__(self, link: DispatcherLink, welcome: messages.Welcome, told: list[messages.Leave]) -> None:
        self.link = link
        self.told_to_leave = told
        super().__init__(RemoteClient(link, welcome))

    def die(self) -> None:
        """Like SIGKILL, as far as its peer can tell."""
        self.end()
        self.link.close()

    def freeze(self) -> None:
        """Like SIGSTOP."""
        self.end()
        for task in self.link.tasks:
            task.cancel()


class Hub:
    """A mini cluster with a hub, and whoever connects to it."""

    def __init__(self, cluster: MiniCluster, directory: Path) -> None:
        self.cluster = cluster
        self.address = f"ipc://{directory}/api-servers"
        self.ready: list[str] = []
        self.stop = asyncio.Event()
        create_loads(directory / "loads", 1 + len(NAMES))
        self.loads = open_loads(directory / "loads")
        self.metrics: ProxyMetrics = cluster.client.dispatcher._metrics
        self.hub = ApiServerHub(self.address, NAMES, self.loads, LIVENESS, self.metrics, self.ready.append)
        self.remotes: list[Remote] = []

    def open(self) -> None:
        self.hub.open(self.cluster.client.dispatcher, self.cluster.pool, engine_facts(self.cluster.pool), 2, self.stop)

    def link(self, name: str, told: list[messages.Leave], lost_after_s: float = 5.0) -> DispatcherLink:
        return DispatcherLink(self.address, name, 0.02, lost_after_s, told.append)

    async def join(self, name: str, lost_after_s: float = 5.0) -> Remote:
        told: list[messages.Leave] = []
        link = self.link(name, told, lost_after_s)
        remote = Remote(link, await link.welcome(5), told)
        self.remotes.append(remote)
        link.send(messages.Ready())
        await until(lambda: name in self.ready)
        return remote

    def close(self) -> None:
        for remote in self.remotes:
            remote.die()
        self.hub.close()


@asynccontextmanager
async def hub_of(tmp_path: Path, *worker_ids: str) -> AsyncIterator[Hub]:
    async with mini_cluster(tmp_path, *worker_ids) as cluster:
        hub = Hub(cluster, tmp_path)
        hub.open()
        try:
            yield hub
        finally:
            hub.close()


def test_vllm_has_what_several_api_servers_on_one_socket_need() -> None:
    assert list(inspect.signature(NoSignalServer.__init__).parameters) == ["self", "config", "peer_loads"]
    assert "loads[index] <= min(loads)" in inspect.getsource(NoSignalServer._least_loaded)
    assert inspect.iscoroutinefunction(NoSignalServer.startup)
    assert (AsyncEngineArgs._api_process_count, AsyncEngineArgs._api_process_rank) == (1, 0)
    assert "_api_process_count == 1" in inspect.getsource(factories), "images are cached as if engines mirrored it"


async def test_front_ends_with_equal_ids_get_their_own_answers_and_nothing_else(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        everyone: list[MiniFrontEnd] = [hub.cluster, *[await hub.join(name) for name in NAMES]]
        prompts = [[100 + index, *PROMPT] for index in range(3)]
        answers = await asyncio.gather(
            *(front_end.run(prompt) for front_end, prompt in zip(everyone, prompts, strict=True) for _ in range(4))
        )
        for index, answer in enumerate(answers):
            assert answer.tokens[0] == generate(prompts[index // 4], 5)
            assert answer.finish_reasons[0] == "length"
        for front_end in everyone:
            seen = {output.request_id for step in front_end.batches for output in step.outputs}
            assert seen == {f"client-id-{number}" for number in range(4)}
            front_end.assert_idle()


async def test_engine_statistics_are_shown_once_beside_the_dispatcher(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        await remote.run()
        assert all(step.scheduler_stats is None for step in remote.batches)
        assert any(step.scheduler_stats is not None for step in hub.cluster.batches)
        assert not any(step.outputs for step in hub.cluster.batches)


async def test_siblings_of_a_remote_request_share_its_prompt(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        answer = await remote.run(n=3, temperature=0.7)
        assert [answer.tokens[index] for index in range(3)] == [generate(PROMPT, 5)] * 3
        assert len(hub.cluster["prefill-0"].submitted) == 1
        remote.assert_idle()
        hub.cluster.assert_idle()


async def test_a_refused_remote_request_is_counted_once_however_many_choices_are_on_their_way(tmp_path: Path) -> None:
    async with hub_of(tmp_path, "decode-0") as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster.pool.give_up("decode-0", "Worker decode-0 died")
        for _ in range(2):
            with pytest.raises(GracefulHTTPError, match="No decode worker is alive"):
                await remote.run(n=5, temperature=0.7)
        counted = {"slo_class": "default", "reason": "no_decode_worker"}
        assert hub.cluster.metric("requests_rejected_total", **counted) == 2
        assert hub.cluster.metric("slo_requests_total", slo_class="default", outcome="rejected") == 2
        (front_end,) = hub.hub._front_ends.values()
        await until(lambda: len(front_end.arrivals) == 0)
        remote.assert_idle()
        hub.cluster.assert_idle()


async def test_a_remote_client_that_leaves_ends_its_request_on_the_workers(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster["prefill-0"].gate.clear()
        await remote.add(remote.request())
        await until(lambda: hub.cluster["prefill-0"].running)
        await remote.abort("client-id-0")
        await until(lambda: not hub.cluster["prefill-0"].running)
        remote.assert_idle()
        hub.cluster.assert_idle()


async def test_what_a_request_may_expect_and_when_to_try_again_travel_along(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster["prefill-0"].gate.clear()
        standing = Standing(SloClass("chat", 0.5, 0.05, "reject"), -3, "tenant")
        context = RequestContext(standing)
        token = CURRENT.set(context)
        collector = await remote.add(remote.request())
        CURRENT.reset(token)
        trips = hub.cluster.client.dispatcher.trips
        await until(lambda: trips)
        (trip,) = trips.values()
        assert trip.shape.standing == standing
        trip.front_end.fail(trip.request_id, 503, "Every worker is busy", 7.0)
        with pytest.raises(GracefulHTTPError, match="busy"):
            await read(collector)
        assert context.retry_after_s == 7.0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_reaches_the_front_end_with_its_status_and_ends_siblings(tmp_path: Path, n: int) -> None:
    async with hub_of(tmp_path, "decode-0") as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster["decode-0"].gate.clear()
        collector = await remote.add(remote.request(n=n, temperature=0.5))
        await until(lambda: len(hub.cluster["decode-0"].running) == n)
        trip = next(iter(hub.cluster.client.dispatcher.trips))
        trip_of = hub.cluster.client.dispatcher.trips[trip]
        trip_of.front_end.fail(trip, 503, "Worker decode-0 ran out of memory", 2.0)
        with pytest.raises(GracefulHTTPError, match="ran out of memory") as raised:
            await read(collector)
        assert raised.value.http_status == 503
        remote.assert_idle()
        await until(lambda: len(hub.cluster["decode-0"].running) <= 1)


async def test_transfer_parameters_of_a_client_are_refused_by_the_process_that_got_them(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        with pytest.raises(VLLMValidationError, match="not accepted from clients"):
            await remote.add(remote.request(extra_args={"kv_transfer_params": {"a": 1}}))
        remote.assert_idle()


def _by_exit(hub: Hub, remote: Remote) -> None:
    remote.die()
    hub.hub.gone(NAMES[0], "process api-server-1 was killed by SIGKILL")


def _by_silence(_hub: Hub, remote: Remote) -> None:
    remote.freeze()


@pytest.mark.parametrize("death", [_by_exit, _by_silence])
async def test_requests_of_a_lost_front_end_are_aborted_and_others_go_on(
    tmp_path: Path, death: Callable[[Hub, Remote], None]
) -> None:
    async with hub_of(tmp_path) as hub:
        lost, other = await hub.join(NAMES[0]), await hub.join(NAMES[1])
        hub.loads[1] = 3
        prefill = hub.cluster["prefill-0"]
        prefill.gate.clear()
        await lost.add(lost.request())
        collector = await other.add(other.request())
        await until(lambda: len(prefill.running) == 2)
        death(hub, lost)
        await until(lambda: len(prefill.running) == 1)
        assert [trip.request_id for trip in hub.cluster.client.dispatcher.trips.values()] == [
            "api-server-2.1/client-id-0"
        ]
        prefill.gate.set()
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        hub.cluster.assert_idle()
        assert hub.cluster.metric("api_server_losses_total") == 1
        assert [status.state for status in hub.hub.statuses({})] == ["starting", "ready"]
        if death is _by_exit:
            assert hub.loads[1] == NOT_ACCEPTING, "nobody leaves connections to it"


async def test_a_new_life_takes_the_place_of_the_former_and_is_served(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        former = await hub.join(NAMES[0])
        hub.cluster["prefill-0"].gate.clear()
        await former.add(former.request())
        await until(lambda: hub.cluster["prefill-0"].running)
        await hub.join(NAMES[0])
        await until(lambda: not hub.cluster["prefill-0"].running)
        hub.cluster["prefill-0"].gate.set()
        assert (await hub.remotes[1].run()).tokens[0] == generate(PROMPT, 5)
        await until(lambda: former.told_to_leave)


async def test_a_process_that_was_given_up_and_goes_on_is_told_to_leave(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        hub.hub.gone(NAMES[0], "a mistake")
        await until(lambda: len(remote.told_to_leave) > 1)
        assert "given this process up" in remote.told_to_leave[-1].cause
        assert not remote.told_to_leave[-1].for_good, "it is to be started again"


async def test_nobody_is_welcome_before_the_workers_are_up_or_under_another_name(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        hub = Hub(cluster, tmp_path)
        told: list[messages.Leave] = []
        early, stranger = hub.link(NAMES[0], []), hub.link("api-server-9", told)
        with pytest.raises(DispatcherLost, match=r"not up within 0\.1 s"):
            await early.welcome(0.1)
        hub.open()
        assert (await early.welcome(5)).engine.max_model_len == 4096
        await until(lambda: told)
        assert told[0].cause == "no API server api-server-9 is expected"
        assert await hub.hub.until_ready(0.01) == NAMES
        for link in (early, stranger):
            link.close()
        hub.close()


async def test_the_status_tells_what_the_launcher_does_about_a_process_that_ended(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        await hub.join(NAMES[0])
        notes = {name: LaunchNote(name == NAMES[0], "a note", 1) for name in NAMES}
        ready, dead = hub.hub.statuses(notes)
        assert (ready.state, ready.note) == ("ready", "")
        assert (dead.state, dead.note) == ("dead", "a note")
        hub.hub.gone(NAMES[0], "killed")
        assert hub.hub.statuses(notes)[0].state == "starting"


async def test_when_the_run_ends_requests_fail_first_and_then_everybody_leaves(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster["prefill-0"].gate.clear()
        collector = await remote.add(remote.request())
        await until(lambda: hub.cluster["prefill-0"].running)
        hub.stop.set()
        with pytest.raises(GracefulHTTPError, match="shutting down"):
            await read(collector)
        await until(lambda: remote.told_to_leave == [messages.Leave("the cluster is shutting down", for_good=True)])


async def test_a_front_end_without_dispatcher_fails_what_is_open_and_ends(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        hub = Hub(cluster, tmp_path)
        hub.open()
        remote = await hub.join(NAMES[0], lost_after_s=0.2)
        cluster["prefill-0"].gate.clear()
        collector = await remote.add(remote.request())
        await until(lambda: cluster["prefill-0"].running)
        hub.hub.close()
        asking = asyncio.create_task(remote.core.reset_mm_cache_async())
        await asyncio.wait(remote.link.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        with pytest.raises(DispatcherLost, match="nothing was heard of the dispatcher"):
            remote.link.tasks[1].result()
        with pytest.raises(GracefulHTTPError):
            await asking
        remote.end()
        remote.core.die("the dispatcher is lost")
        with pytest.raises(GracefulHTTPError, match="the dispatcher is lost"):
            await read(collector)
        remote.die()


async def test_engine_calls_of_a_remote_front_end_go_to_every_worker(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        assert await remote.core.reset_prefix_cache_async(True, False) is True
        for worker in hub.cluster.workers.values():
            assert worker.utilities == [("reset_prefix_cache", [True, False])]
        hub.cluster["decode-0"].utility_error = "ValueError: no such adapter"
        with pytest.raises(GracefulHTTPError, match="worker decode-0: ValueError: no such adapter"):
            await remote.core.remove_lora_async(3)
        assert await remote.core.get_supported_tasks_async() == ("generate",)


async def test_every_api_server_knows_an_adapter_before_its_load_is_answered(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        first, second = [await hub.join(name) for name in NAMES]
        lists = [SimpleNamespace(lora_requests={}, unload_lora_adapter=None) for _ in range(3)]
        for front_end, models in zip((hub.cluster, first, second), lists, strict=True):
            front_end.core.serve_adapters(models)
        asked = LoRARequest("poet", 1, "/adapters/poet")
        assert await first.core.add_lora_async(asked) is True
        number = Adapter("poet", "/adapters/poet").adapter_id
        assert asked.lora_int_id == number
        assert [models.lora_requests["poet"].lora_int_id for models in lists] == [number] * 3
        assert await second.core.add_lora_async(LoRARequest("poet", 1, "/adapters/poet")) is True
        for worker in hub.cluster.workers.values():
            assert [method for method, _ in worker.utilities] == ["add_lora"], "the same adapter is loaded once"
        request = second.request()
        request.lora_request = lists[2].lora_requests["poet"]
        assert (await read(await second.add(request))).tokens[0] == generate(PROMPT, 5)
        await hub.cluster.pool.adapters.unload("poet")
        assert [models.lora_requests for models in lists] == [{}, {}, {}]


async def test_an_api_server_that_comes_later_is_told_the_adapters(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        await hub.cluster.core.add_lora_async(LoRARequest("poet", 1, "/adapters/poet"))
        remote = await hub.join(NAMES[0])
        models = SimpleNamespace(lora_requests={})
        remote.core.serve_adapters(models)
        await until(lambda: "poet" in models.lora_requests)


async def test_an_api_server_that_stands_still_does_not_hold_up_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ADAPTERS_KNOWN_WITHIN_S", 0.05)
    async with hub_of(tmp_path) as hub:
        (await hub.join(NAMES[0])).freeze()
        assert await hub.cluster.core.add_lora_async(LoRARequest("poet", 1, "/adapters/poet")) is True


async def test_a_load_that_fails_is_told_to_the_api_server_that_asked(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        hub.cluster["decode-0"].utility_error = "ValueError: rank 64"
        with pytest.raises(GracefulHTTPError, match="poet was not loaded: worker decode-0: ValueError: rank 64"):
            await remote.core.add_lora_async(LoRARequest("poet", 1, "/adapters/poet"))


async def test_bad_frames_are_dropped_and_counted_and_a_damaged_request_fails(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        add = messages.Add("client-id-0", DEFAULT_STANDING, "")
        request = remote.request()
        collector = await _known_to_front_end(remote, request)
        for frames in ([b"\xc1"], [msgspec.msgpack.encode(messages.Beat()), b"x"], [b""]):
            await remote.link._socket.send_multipart(frames)
        remote.link.send(add, [b"\xff\xff"])
        with pytest.raises(GracefulHTTPError, match="damaged on its way"):
            await read(collector)
        assert hub.cluster.metric("api_server_bad_frames_total") == 4
        assert (await remote.run()).tokens[0] == generate(PROMPT, 5)


async def _known_to_front_end(remote: Remote, request: Any) -> Any:
    sent, remote.link.send = remote.link.send, lambda *_: None  # type: ignore[method-assign]
    collector = await remote.add(request)
    remote.link.send = sent  # type: ignore[method-assign]
    return collector


async def test_bad_frames_from_the_dispatcher_are_dropped_and_counted(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(f"ipc://{tmp_path}/api-servers")
    link = DispatcherLink(f"ipc://{tmp_path}/api-servers", NAMES[0], 0.02, 5, lambda _cause: None)
    identity, _ = await router.recv_multipart()
    await router.send_multipart([identity, b"\xc1"])
    await router.send_multipart([identity, msgspec.msgpack.encode(messages.CallReply(7, "", msgspec.Raw(b"\x90")))])
    await until(lambda: link.bad_frames == 1)
    link.close()
    router.close()
    context.term()


async def test_a_control_request_is_answered_by_the_application_beside_the_dispatcher(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        remote = await hub.join(NAMES[0])
        heard: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            heard.append((scope["method"], scope["path"], scope["query_string"], (await receive())["body"]))
            await send({"type": "http.response.start", "status": 202, "headers": [(b"x-kept", b"yes")]})
            await send({"type": "http.response.body", "body": b"drained"})

        hub.hub.answer_with(app)
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        async def vllms_own(_scope: Any, _receive: Any, _send: Any) -> None:
            raise AssertionError("it is not vLLM's")

        scope = {"type": "http", "method": "POST", "path": "/twinpool/drain", "query_string": b"w=1", "headers": []}
        await ControlForward(vllms_own, remote.link.control)(scope, receive, send)
        assert heard == [("POST", "/twinpool/drain", b"w=1", b"{}")]
        assert sent[0]["status"] == 202
        assert dict(sent[0]["headers"])[b"x-kept"] == b"yes"
        assert sent[1]["body"] == b"drained"
