"""`twinpool up` and `twinpool down`: a cluster in the background. Both may be repeated."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cluster.background.record import (
    BackgroundError,
    Record,
    ask_to_end,
    began,
    config_hash,
    forget,
    lives,
    living_ports,
    living_record,
    locked,
    log_path,
    record_path,
    write_record,
)
from cluster.config import ClusterConfig
from cluster.orders import CloseOrder
from cluster.terminal.demo import SERVING
from cluster.terminal.server_calls import ApiKey, CallFailed, fail, fetch_status, give_order

COMMAND = (sys.executable, "-c", "from cluster.cli import main; main()", "serve")
_LOOK_AGAIN_S = 0.2
_MARGIN_S = 30.0
"""For a machine that is short of CPU, after the time that the cluster gave itself."""
_LAST_LINES = 15
_SERVING_LINE = re.compile(rf"^{SERVING}.* at (\S+)/v1\b", re.MULTILINE)

Port = Annotated[int | None, typer.Option(help="Its server.port, if more than one cluster is up.")]
Now = Annotated[bool, typer.Option("--now", help="Do not wait for requests that are under way.")]
TimeLimit = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Instead of drain_timeout_s of the configuration."),
]


def bring_up(config: ClusterConfig, arguments: Sequence[str]) -> None:
    """Starts `twinpool serve ARGUMENTS` in the background unless it is up already, and prints its URL when it serves.

    Ends the command with a sentence if it does not come up.
    """
    port = config.server.port
    try:
        with locked(port):
            record = living_record(port)
            if record is None:
                record = _start(config, arguments)
            elif record.config_hash != config_hash(config):
                raise BackgroundError(
                    f"a cluster with another configuration is up on port {port} (process {record.pid}); stop it with "
                    "`twinpool down`, or choose another server.port"
                )
            record = _await(record, port)
    except BackgroundError as error:
        fail(str(error), 1)
    sys.stdout.write(f"{record.url}\n")


def _start(config: ClusterConfig, arguments: Sequence[str]) -> Record:
    port = config.server.port
    hashed = config_hash(config)
    log = log_path(port)
    log.unlink(missing_ok=True)
    pid = os.posix_spawn(
        COMMAND[0],
        (*COMMAND, *arguments),
        os.environ,
        file_actions=(
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ),
        setsid=True,
    )
    record = Record(
        pid=pid,
        began=began(pid),
        url="",
        config_hash=hashed,
        log=str(log),
        stop_timeout_s=config.stop_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        start_timeout_s=config.start_timeout_s,
    )
    try:
        write_record(port, record)
    except BaseException as error:
        ask_to_end(record)  # `twinpool down` would not find it
        if isinstance(error, OSError):
            raise BackgroundError(f"cannot write {record_path(port)}: {error.strerror}; nothing is up") from error
        raise
    return record


def _await(record: Record, port: int) -> Record:
    """Returns when the cluster serves, with its URL; raises `BackgroundError` when it ends before. Ctrl-C ends it."""
    deadline_s = time.monotonic() + record.start_timeout_s + _MARGIN_S
    console = Console(stderr=True, highlight=False)
    log = Path(record.log)
    try:
        with console.status("starting"):
            while not (url := record.url or _url(log)):
                if not lives(record):
                    forget(port)
                    raise BackgroundError(f"the cluster did not come up; the end of {log}:\n{_tail(log)}")
                if time.monotonic() > deadline_s:
                    raise BackgroundError(
                        f"the cluster (process {record.pid}) does not serve yet; its log is {log}; `twinpool up` waits "
                        "on, `twinpool down --now` stops it"
                    )
                time.sleep(_LOOK_AGAIN_S)
    except KeyboardInterrupt:
        ask_to_end(record)
        _until_ended(record, record.stop_timeout_s + _MARGIN_S)
        forget(port)
        raise
    if url != record.url:
        record = msgspec.structs.replace(record, url=url)
        write_record(port, record)
    return record


def _url(log: Path) -> str:
    """Where the cluster says that it serves; empty until it does."""
    found = _SERVING_LINE.search(_text(log))
    return found[1] if found else ""


def _tail(log: Path) -> str:
    return "\n".join(f"  | {line}" for line in _text(log).splitlines()[-_LAST_LINES:])


def _text(log: Path) -> str:
    """Empty if somebody has removed it."""
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _until_ended(record: Record, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while lives(record):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def down(port: Port = None, now: Now = False, timeout_s: TimeLimit = None, api_key: ApiKey = "") -> None:
    """Stop a cluster that `twinpool up` started.

    It takes no new requests and finishes those that it has. If nothing is up, nothing happens.
    """
    try:
        ports = [port] if port is not None else living_ports()
        if len(ports) > 1:
            raise BackgroundError(f"clusters are up on the ports {', '.join(map(str, ports))}; name one with --port")
        for one in ports:
            with locked(one):
                if (record := living_record(one)) is not None:
                    _stop(record, one, now, timeout_s, api_key)
                    sys.stdout.write(f"{record.url or f'port {one}'} is down\n")
                    return
    except (BackgroundError, CallFailed) as error:
        fail(str(error), 1)
    sys.stdout.write("nothing is up\n")


def _stop(record: Record, port: int, now: bool, timeout_s: float | None, api_key: str) -> None:
    try:
        if not now and record.url:
            give_order(record.url, api_key, "/twinpool/close", CloseOrder())
            _until_idle(record, time.monotonic() + (timeout_s or record.drain_timeout_s), api_key)
    except CallFailed:
        if lives(record):
            raise  # whoever ends meanwhile, ends without an answer
    ask_to_end(record)
    if not _until_ended(record, record.stop_timeout_s + _MARGIN_S):
        raise BackgroundError(f"process {record.pid} of the cluster does not end; see {record.log}")
    forget(port)


def _until_idle(record: Record, deadline_s: float, api_key: str) -> None:
    """Returns when no request is left, at the latest at the deadline: what is left then gets an error."""
    console = Console(stderr=True, highlight=False)
    with console.status("finishing requests") as line:
        while lives(record) and time.monotonic() < deadline_s:
            status = fetch_status(record.url, api_key)[1]
            left = status.requests_running + status.requests_waiting
            if not left:
                return
            line.update(f"finishing {left} requests")
            time.sleep(_LOOK_AGAIN_S)
