"""What `POST /twinpool/...` takes and answers: the command line sends it, the proxy carries it out."""

from typing import Annotated, Literal

import msgspec

TimeLimit = Annotated[float, msgspec.Meta(gt=0)] | None
"""Seconds to finish everything; None: `drain_timeout_s` of the configuration."""


SCALE_PATH = "/admin/scale"


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/workers/{id}/drain`: finish everything, then leave."""

    timeout_s: TimeLimit = None
    force: bool = False
    """Also if no decode worker is left."""


class RoleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/workers/{id}/role`: finish everything, then serve in this role."""

    role: Literal["prefill", "decode"]
    timeout_s: TimeLimit = None
    force: bool = False


class RestartOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/restart`: one worker after another leaves, is started again and joins."""

    workers: str
    """The id of one, `prefill`, `decode` or `all`."""
    timeout_s: TimeLimit = None
    force: bool = False


class ScaleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST` to `SCALE_PATH`: afterwards a pool has so many workers."""

    pool: Literal["prefill", "decode"]
    replicas: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    timeout_s: TimeLimit = None


class CloseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/close`: finish every request, take no new ones; the cluster is about to be stopped."""


class SleepOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/sleep`: finish every request, then give the devices' memory back; weights stay in the host's."""

    timeout_s: TimeLimit = None
    """For the requests."""


class WakeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /twinpool/wake`."""

    timeout_s: TimeLimit = None


class Slept(msgspec.Struct, frozen=True):
    """200: it sleeps, or is awake."""

    state: str
    """`asleep` or `awake`."""
    took_s: float


class Accepted(msgspec.Struct, frozen=True):
    """202: it is under way; `GET /twinpool/status` shows how far."""

    message: str
    workers: list[str]
    within_s: float
    """It is done or given up by then."""


class RefusalText(msgspec.Struct, frozen=True):
    message: str
    code: int


class Refusal(msgspec.Struct, frozen=True):
    """400 (no such order), 401 (the API key), 404 (no such worker) or 409 (it cannot be done now)."""

    error: RefusalText


class RollingStatus(msgspec.Struct, frozen=True):
    """The last rolling restart of this run."""

    workers: list[str]
    done: list[str]
    current: str = ""
    """Whose turn it is; empty when it has ended."""
    failed: str = ""
    """Why it ended before all were done."""
