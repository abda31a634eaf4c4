"""Orders about workers: what is refused and why, and starting workers again one after another."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX, AuthenticationMiddleware

from cluster.orders import DrainOrder, RestartOrder, RoleOrder
from cluster.status import LaunchNote, WorkerStatus
from proxy.frontend.order_routes import add_order_routes
from proxy.frontend.status_report import report
from proxy.middleware.key_guard import ask_for_key
from proxy.workers.administration import Administration, OrderRefused
from proxy.workers.rolling_restart import RollingTimes
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, mini_cluster, read, until

FOUR = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TIMES = RollingTimes(drain_timeout_s=5, start_timeout_s=5, stop_s=1)


class Control:
    """A launcher whose workers are fake ones."""

    def __init__(self, cluster: MiniCluster) -> None:
        self.cluster = cluster
        self.kept_down: list[str] = []
        self.awaited: list[str] = []
        self.started: list[str] = []
        self.says: dict[str, LaunchNote] = {}
        self.starts_nobody = False
        self.tasks: list[asyncio.Task[None]] = []

    def knows(self, worker_id: str) -> bool:
        return worker_id in (*FOUR, "api-server-1")

    def keep_down(self, worker_id: str) -> None:
        self.kept_down.append(worker_id)

    def start_when_gone(self, worker_id: str) -> None:
        self.awaited.append(worker_id)
        self.tasks.append(asyncio.create_task(self._start_when_gone(worker_id)))

    def start_now(self, worker_id: str) -> None:
        self.started.append(worker_id)
        self.tasks.append(asyncio.create_task(self._start(worker_id)))

    def hire(self, role: str, count: int) -> list[str]:
        raise NotImplementedError

    def remove(self, worker_id: str, *, at_once: bool = False) -> None:
        raise NotImplementedError

    def joined(self, worker_id: str, role: str) -> None:
        raise AssertionError("the pool tells that")

    def notes(self) -> Mapping[str, LaunchNote]:
        return self.says

    async def _start_when_gone(self, worker_id: str) -> None:
        await until(lambda: self.cluster[worker_id].left)
        await self._start(worker_id)

    async def _start(self, worker_id: str) -> None:
        if self.starts_nobody:
            self.says[worker_id] = LaunchNote(True, "it is started again in 1 s", 0)
            await asyncio.sleep(0.1)
            self.says[worker_id] = LaunchNote(False, "it failed 5 times in a row", 0)
            self.cluster.pool.give_up(worker_id, "it failed")
            return
        await self.cluster[worker_id].stop()
        await self.cluster.join(worker_id)


@asynccontextmanager
async def administered(
    tmp_path: Path, *worker_ids: str, times: RollingTimes = TIMES
) -> AsyncIterator[tuple[MiniCluster, Administration, Control]]:
    async with mini_cluster(tmp_path, *(worker_ids or FOUR)) as cluster:
        control = Control(cluster)
        administration = Administration(cluster.pool, control, times)
        try:
            yield cluster, administration, control
        finally:
            administration.close()
            for task in control.tasks:
                task.cancel()


def shown(cluster: MiniCluster, administration: Administration, worker_id: str) -> WorkerStatus:
    """A worker in the status."""
    status = report("m", cluster.pool, cluster.client.dispatcher, administration)
    return next(worker for worker in status.workers if worker.worker_id == worker_id)


def ended(administration: Administration) -> bool:
    return administration.rolling is not None and not administration.rolling.current


async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    async with administered(tmp_path, "prefill-0", "decode-0") as (cluster, administration, _control):
        with pytest.raises(OrderRefused, match="decode-7 is not known; there are prefill-0, decode-0") as refused:
            administration.drain("decode-7", DrainOrder())
        assert refused.value.status == 404
        with pytest.raises(OrderRefused, match="decode-0 is the last decode worker"):
            administration.drain("decode-0", DrainOrder())
        with pytest.raises(OrderRefused, match="decode-0 is the last decode worker"):
            administration.set_role("decode-0", RoleOrder("prefill"))
        with pytest.raises(OrderRefused, match="no other decode worker"):
            administration.restart(RestartOrder("all"))
        with pytest.raises(OrderRefused, match="no worker decode-7 is known"):
            administration.restart(RestartOrder("decode-7"))
        cluster.pool.give_up("prefill-0", "Worker prefill-0 was killed")
        with pytest.raises(OrderRefused, match="prefill-0 is not alive: Worker prefill-0 was killed") as refused:
            administration.drain("prefill-0", DrainOrder())
        assert refused.value.status == 409
        assert [w.worker_id for w in cluster.pool.roster.taking_requests()] == ["decode-0"]


async def test_a_drain_is_accepted_again_and_again_and_the_worker_stays_away(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        cluster["decode-1"].gate.clear()
        for _ in range(2):
            assert administration.drain("decode-1", DrainOrder()).workers == ["decode-1"]
        assert control.kept_down == ["decode-1", "decode-1"]
        with pytest.raises(OrderRefused, match="decode-1 is leaving"):
            administration.set_role("decode-1", RoleOrder("prefill"))
        assert shown(cluster, administration, "decode-1").state == "draining"
        await until(lambda: not cluster.pool.roster.workers["decode-1"].alive)
        last = shown(cluster, administration, "decode-1")
        assert (last.state, last.cause) == ("drained", "Worker decode-1 left: drained")


async def test_the_last_decode_worker_goes_if_that_is_wanted(tmp_path: Path) -> None:
    async with administered(tmp_path, "prefill-0", "decode-0") as (cluster, administration, _control):
        administration.set_role("decode-0", RoleOrder("prefill", force=True))
        await until(lambda: cluster.pool.roster.workers["decode-0"].role == "prefill")


async def test_a_role_that_it_has_is_done_at_once(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_cluster, administration, _control):
        assert administration.set_role("prefill-1", RoleOrder("prefill")).within_s == 0.0


async def test_all_workers_are_started_again_one_after_another_and_no_request_fails(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        epochs = {worker_id: cluster[worker_id].epoch for worker_id in FOUR}
        assert administration.restart(RestartOrder("all")).workers == list(FOUR)
        with pytest.raises(OrderRefused, match="is under way"):
            administration.restart(RestartOrder("prefill"))
        num_answers = 0
        while not ended(administration):
            collectors = [await cluster.add(cluster.request()) for _ in range(3)]
            for collector in collectors:
                assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
                num_answers += 1
            assert len(cluster.pool.roster.taking_requests()) >= 3, "one at a time"
        assert num_answers > 10
        assert administration.rolling is not None
        assert administration.rolling.done == list(FOUR)
        assert administration.rolling.failed == ""
        assert control.awaited == list(FOUR)
        assert all(cluster.pool.roster.workers[name].hello.epoch != epoch for name, epoch in epochs.items())
        assert cluster.metric("replacements_total") == 0
        assert cluster.metric("worker_restarts_total", worker="decode-1") == 1


async def test_who_is_away_is_started_and_a_pool_is_chosen_by_the_role_it_serves_in(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        administration.set_role("prefill-1", RoleOrder("decode"))
        await until(lambda: cluster.pool.roster.workers["prefill-1"].role == "decode")
        cluster.pool.give_up("prefill-0", "killed")
        administration.restart(RestartOrder("prefill"))
        await until(lambda: ended(administration))
        assert (control.started, control.awaited) == (["prefill-0"], [])


async def test_who_is_away_comes_first_and_stands_in_for_the_others(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        cluster.pool.give_up("decode-1", "killed")
        administration.restart(RestartOrder("decode"))
        await until(lambda: ended(administration))
        assert (control.started, control.awaited) == (["decode-1"], ["decode-0"])


async def test_a_worker_that_does_not_come_back_ends_the_rest(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_cluster, administration, control):
        control.starts_nobody = True
        administration.restart(RestartOrder("prefill"))
        await until(lambda: ended(administration))
        assert administration.rolling is not None
        assert administration.rolling.done == []
        assert administration.rolling.failed == "prefill-0 did not come up: it failed 5 times in a row"


async def test_a_worker_that_does_not_leave_is_ended(tmp_path: Path) -> None:
    times = RollingTimes(drain_timeout_s=0.05, start_timeout_s=5, stop_s=0.05)
    async with administered(tmp_path, times=times) as (cluster, administration, control):
        cluster["prefill-0"]._tasks[2].cancel()  # it never says goodbye
        administration.restart(RestartOrder("prefill-0"))
        await until(lambda: ended(administration))
        assert control.started == ["prefill-0"]
        assert administration.rolling is not None
        assert administration.rolling.done == ["prefill-0"]


async def test_without_a_launcher_nobody_is_restarted(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, _, _control):
        with pytest.raises(OrderRefused, match="not started by this server"):
            Administration(cluster.pool, None, TIMES).restart(RestartOrder("all"))


# ----------------------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "text"),
    [
        ("workers/decode-1/drain", "", "sesame", 202, "decode-1 finishes what it has and leaves"),
        ("workers/decode-1/role", '{"role":"prefill"}', "sesame", 202, "then serves as prefill"),
        ("restart", '{"workers":"decode-1"}', "sesame", 202, "decode-1"),
        ("workers/decode-1/drain", "", "wrong", 401, "the API key is missing or wrong"),
        ("workers/decode-1/role", '{"role":"prefill"}', "", 401, "the API key"),
        ("restart", '{"workers":"all"}', "", 401, "the API key"),
        ("workers/decode-7/drain", "{}", "sesame", 404, "decode-7 is not known"),
        ("workers/decode-1/role", '{"role":"router"}', "sesame", 400, "role"),
        ("workers/decode-1/drain", '{"timeout_s":-1}', "sesame", 400, "timeout_s"),
        ("workers/decode-1/drain", '{"forse":true}', "sesame", 400, "forse"),
        ("restart", "", "sesame", 400, "workers"),
        ("/admin/scale", '{"pool":"decode","replicas":2}', "sesame", 202, "the decode pool has 2 workers already"),
        ("/admin/scale", '{"pool":"decode","replicas":0}', "sesame", 409, "leave at least one"),
        ("/admin/scale", '{"pool":"decode","replicas":2}', "", 401, "the API key"),
        ("/admin/scale", '{"pool":"decode","replicas":-1}', "sesame", 400, "replicas"),
        ("close", "", "sesame", 202, "takes no new requests"),
        ("close", "", "", 401, "the API key"),
    ],
)
async def test_orders_need_the_key_and_name_what_is_wrong(
    tmp_path: Path, path: str, body: str, key: str, status: int, text: str
) -> None:
    async with administered(tmp_path) as (_cluster, administration, _control):
        app = FastAPI()
        add_order_routes(app, administration, lambda: None)
        ask_for_key(app, AuthenticationMiddleware(app, ["sesame"]).verify_token, lambda: None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            answer = await client.post(urljoin("/twinpool/", path), content=body, headers=headers)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_vllm_does_not_check_the_key_of_these_routes_itself() -> None:
    assert not "/twinpool/restart".startswith(GUARDED_PREFIX)


async def test_a_process_that_is_no_worker_is_started_again_at_once(tmp_path: Path) -> None:
    class OnlyNotes(Control):
        def start_now(self, worker_id: str) -> None:
            self.started.append(worker_id)

    async with mini_cluster(tmp_path) as cluster:
        control = OnlyNotes(cluster)
        administration = Administration(cluster.pool, control, TIMES)
        assert administration.restart(RestartOrder("api-server-1")).workers == ["api-server-1"]
        assert control.started == ["api-server-1"]
        assert administration.rolling is not None
        assert administration.rolling.done == administration.rolling.workers
