"""Where the proxy listens for workers, and with which key: decided once per run, written into the configuration.

Sockets in the run's private directory (0700) need no key: whoever can open them can read the key too.
"""

import socket
from pathlib import Path

import zmq
import zmq.asyncio

from cluster.config import ClusterConfig
from cluster.configuration.security import SecurityConfig
from kvtransfer.trust.door import Door, call_with_key, is_network
from kvtransfer.trust.key import ClusterKey, KeyFileError, new_key, read_key, write_key

__all__ = [
    "ClusterKey", "Door", "KeyFileError", "attend", "call_with_key", "cluster_key", "is_network", "listens_on_tcp",
    "new_key", "proxy_address", "reached_at", "read_key", "with_trust", "write_key",
]  # fmt: skip


async def attend(door: Door) -> None:
    """Answers at the door until cancelled, in the event loop that its socket is used in."""
    poller = zmq.asyncio.Poller()
    for at_the_door in door.sockets:
        poller.register(at_the_door, zmq.POLLIN)
    while True:
        await poller.poll()
        door.attend()


def listens_on_tcp(config: ClusterConfig) -> bool:
    """Whether the proxy or ranks can be reached by others than this user's processes on this machine."""
    return bool(config.security.workers_host or config.transfer.bind_host)


def reached_at(config: ClusterConfig, host: str) -> ClusterConfig:
    """The configuration of a cluster whose workers reach this machine at an address, unless another one is given."""
    security = config.security
    changes = {} if security.workers_host else {"workers_host": host}
    return config.model_copy(update={"security": security.model_copy(update=changes)})


def with_trust(config: ClusterConfig, runtime_dir: Path) -> ClusterConfig:
    """The configuration with the key file and the port that this run uses; raises `KeyFileError`, `OSError`.

    A key is made where one is needed and none is given.
    """
    if not listens_on_tcp(config):
        return config
    security = config.security
    changes: dict[str, object] = {}
    if security.key_file:
        changes["key_file"] = str(Path(security.key_file).expanduser().absolute())
        read_key(Path(str(changes["key_file"])))
    else:
        changes["key_file"] = str(write_key(runtime_dir / "cluster.key", new_key()))
    if security.workers_host and not security.workers_port:
        changes["workers_port"] = _free_port(security.workers_host)
    return config.model_copy(update={"security": security.model_copy(update=changes)})


def cluster_key(config: ClusterConfig) -> ClusterKey | None:
    """The key of a configuration that `with_trust` returned; None where nothing listens on tcp."""
    return read_key(Path(config.security.key_file)) if listens_on_tcp(config) else None


def proxy_address(runtime_dir: Path, security: SecurityConfig) -> str:
    """Where the proxy listens for the workers of this run."""
    if not security.workers_host:
        return f"ipc://{runtime_dir}/proxy"
    return f"tcp://{security.workers_host}:{security.workers_port}"


def _free_port(host: str) -> int:
    """Workers are told it before the proxy binds it; who takes it in between is named by the proxy's failure."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
