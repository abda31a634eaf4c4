"""What `/admin/models` answers: the front writes it, `twinpool model` reads it."""

import msgspec


class ModelStatus(msgspec.Struct, frozen=True):
    """One model as the front sees it."""

    name: str
    policy: str
    state: str
    """`down`, `making room`, `starting`, `up`, `stopping`, `falling asleep`, `asleep`, `waking`; `draining` while it is
    being removed."""
    cost: int = 1
    cause: str = ""
    """Why it ended by itself the last time."""
    running: int = 0
    """Requests that it has."""
    waiting: int = 0
    """Requests that wait until it is up."""
    starts: int = 0
    """How often it was started."""
    wakes: int = 0
    """How often it was woken."""
    aliases: list[str] = []
    """Further names under which it can be asked for."""
    log: str = ""
    """The log of its cluster, once it was started."""
    kept: bool = True
    """It is there after the next start of the server too: it is in its configuration, or remembered beside it."""


class ModelList(msgspec.Struct, frozen=True):
    """`GET /admin/models`."""

    models: list[ModelStatus]
    capacity: int | None = None
    used: int = 0
    """Sum of `cost` of the models that have processes and do not sleep."""


class ModelRemoval(msgspec.Struct, frozen=True):
    """`DELETE /admin/models/{name}`, 202: it takes no more requests, and ends when it has finished those it has."""

    name: str
    within_s: float
    """By then it is off the map; its processes take as long as they need to stop."""
    returns: bool = False
    """It is there again after the next start of the server, whose configuration names it."""
