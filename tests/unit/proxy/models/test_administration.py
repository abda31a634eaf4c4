"""What becomes of models that are added while the front serves, at its next start."""

import stat
from pathlib import Path
from typing import Any

from cluster.models.added_models import AddedModels, read_added
from proxy.models.serve import put_back
from tests.unit.proxy.models.front_server import Running, echo, front

ON_DEMAND = {"policy": "on_demand", "min_residency_s": 0}
BETA = {"name": "beta", "policy": "on_demand", "cluster": {"model": "/m"}, "env": {"TOKEN": "s3cret"}}


async def order(running: Running, method: str, path: str, **arguments: Any) -> dict[str, Any]:
    async with running.http.request(method, path, **arguments) as response:
        assert response.status < 300
        found: dict[str, Any] = await response.json()
        return found


async def test_an_added_model_is_there_after_the_next_start_until_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "added.json"
    remembered = AddedModels(path, {})
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}, remembered=remembered) as running:
        assert (await order(running, "POST", "/admin/models", json=BETA))["kept"] is True
        listed = (await order(running, "GET", "/admin/models"))["models"]
        assert [(model["name"], model["kept"]) for model in listed] == [("alpha", True), ("beta", True)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    said: list[str] = []
    added = read_added(path)
    remembered = AddedModels(path, added)
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}, remembered=remembered) as running:
        await put_back(running.keeper, remembered, added, ["alpha"], said.append)
        assert running.keeper.listed() == ["alpha", "beta"]
        assert running.keeper.status().models[1].policy == "on_demand"
        assert (await order(running, "DELETE", "/admin/models/beta"))["returns"] is False
        assert (await order(running, "DELETE", "/admin/models/alpha"))["returns"] is True
    assert said == []
    assert read_added(path) == {}


async def test_what_is_not_kept_is_said_to_be(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}) as running:
        assert (await order(running, "POST", "/admin/models", json=BETA))["kept"] is False
    unwritable = AddedModels(tmp_path / "nowhere" / "added.json", {})
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}, remembered=unwritable) as running:
        assert (await order(running, "POST", "/admin/models", json=BETA))["kept"] is False
        assert running.keeper.listed() == ["alpha", "beta"]


async def test_what_cannot_be_put_back_is_left_out_and_told_of(tmp_path: Path) -> None:
    path = tmp_path / "added.json"
    remembered = AddedModels(path, {})
    async with front(tmp_path, echo, models={}, remembered=remembered) as running:
        for name, cost in (("large", 4), ("beta", 1), ("alpha", 1)):
            await order(running, "POST", "/admin/models", json={**BETA, "name": name, "cost": cost})
    said: list[str] = []
    added = read_added(path)
    remembered = AddedModels(path, added)
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}, capacity=2, remembered=remembered) as running:
        await put_back(running.keeper, remembered, added, ["alpha"], said.append)
        assert running.keeper.listed() == ["alpha", "beta"]
    assert len(said) == 2
    assert said[0].startswith("large, which was added once, is left out: models.large.cost: found 4")
    assert said[1].startswith("alpha was added once and stands in the configuration now")
    assert list(read_added(path)) == ["large", "beta"]
