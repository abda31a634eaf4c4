"""What a further API server process and the dispatcher say to each other.

Each process connects one DEALER socket to the dispatcher's ROUTER, an ipc socket in the private directory of the run.
Frame 0 is one MessagePack struct from below. `Add` and `Outputs` are followed by the frames that vLLM's own encoder
made of an `EngineCoreRequest` or an `EngineCoreOutputs`, never pickle. Request ids are the process's own; the
dispatcher knows its requests as `Welcome.prefix` + id, so ids of two processes, or of two lives of one, never meet.
"""

import msgspec

from cluster.frames import Count, Seconds, Size
from cluster.messages import EngineFacts
from proxy.adapters.adapter import Adapter
from proxy.scheduling.slo import Standing


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """To the dispatcher: this process is there; again until `Welcome` comes, which waits for the workers."""

    name: str
    """`api-server-1`: its place in this run, whatever the life."""
    pid: Count


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """To the dispatcher: it accepts connections."""


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """Both ways, every `liveness.heartbeat_s`: this side's event loop runs."""


class Add(msgspec.Struct, tag="add", frozen=True):
    """To the dispatcher: a request; the frames of an `EngineCoreRequest` follow."""

    request_id: str
    standing: Standing
    """What it may expect."""
    group: str
    """Names its siblings (`n > 1`); empty otherwise."""
    choices: Count = 1
    """`n`."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """To the dispatcher: nobody wants more of these."""

    request_ids: list[str]
    answered: bool = False
    """A stop string was found: their clients have all they asked for."""


class Call(msgspec.Struct, tag="call", frozen=True):
    """To the dispatcher: call a method of every worker's engine (`cluster.messages.ALLOWED_UTILITIES`)."""

    call_id: Size
    method: str
    args: msgspec.Raw


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """To the dispatcher: load it into every worker, unless that was done."""

    call_id: Size
    adapter: Adapter
    again: bool
    """Its weights have changed."""


class AdaptersKnown(msgspec.Struct, tag="adapters_known", frozen=True):
    """To the dispatcher, answer to `Adapters`: requests that come now are resolved with these."""

    version: Size


class Control(msgspec.Struct, tag="control", frozen=True):
    """To the dispatcher: an HTTP request that concerns the cluster, for the API server beside the dispatcher."""

    call_id: Size
    method: str
    target: str
    """Path and query."""
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """To a process, answer to `Hello` once the workers are up."""

    prefix: str
    engine: EngineFacts
    """All engines as one."""
    num_engines: Count


class Adapters(msgspec.Struct, tag="adapters", frozen=True):
    """To a process, after `Welcome` and whenever they change: the adapters that clients may ask for."""

    version: Size
    """Counts up."""
    adapters: list[Adapter]


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", frozen=True):
    """To a process, answer to `LoadAdapter`."""

    call_id: Size
    error: str
    """Empty on success."""
    adapter: Adapter
    """As workers know it."""


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """To a process: what one engine step gave its requests; the frames of an `EngineCoreOutputs` follow."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """To a process: a request of its failed."""

    request_id: str
    status: Count
    """Of HTTP."""
    message: str
    retry_after_s: Seconds | None = None


class CallReply(msgspec.Struct, tag="call_reply", frozen=True):
    """To a process: the results of all workers, as plain MessagePack data."""

    call_id: Size
    error: str
    """Empty on success."""
    results: msgspec.Raw


class ControlReply(msgspec.Struct, tag="control_reply", frozen=True):
    """To a process."""

    call_id: Size
    status: Count
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """To a process: end."""

    cause: str
    for_good: bool = False
    """The run ends. Otherwise its requests were given up, and it should be started again."""


FromApiServer = Hello | Ready | Beat | Add | Abort | Call | LoadAdapter | AdaptersKnown | Control
ToApiServer = Welcome | Beat | Adapters | Outputs | Failed | CallReply | AdapterLoaded | ControlReply | Leave
