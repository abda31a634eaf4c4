"""The key pair of a cluster: whoever holds it belongs to the cluster, for ZMQ's CURVE encryption.

All processes of a cluster hold the same pair, as a server and as a client. It travels in files that only their owner
may read, never on a command line and never in vLLM's configuration, which vLLM logs.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

_KEY_BYTES = 32


class KeyFileError(Exception):
    """A key file cannot be used; a sentence for the operator, without the key."""


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair, each half in ZMQ's printable form of 40 characters."""

    public: str
    secret: str = field(repr=False)


def new_key() -> ClusterKey:
    """A pair that nobody else has."""
    public, secret = zmq.curve_keypair()
    return ClusterKey(public.decode(), secret.decode())


def read_key(path: Path) -> ClusterKey:
    """Reads a secret certificate in pyzmq's form; raises `KeyFileError`.

    The file must belong to this user, and nobody else may have any right to it.
    """
    try:
        about = path.stat()
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            mode, owner = stat.S_IMODE(about.st_mode), about.st_uid
            raise KeyFileError(
                f"the key file {path} has mode {mode:04o} and belongs to user {owner}, so others may know the key: "
                "make it yours alone with chown and chmod 0600"
            )
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KeyFileError(f"cannot read the key file {path}: {reason}") from error
    if secret is None or not is_pair(public.decode("latin-1"), secret.decode("latin-1")):
        raise KeyFileError(
            f"the key file {path} holds no pair of a public-key and its secret-key; make one with "
            "zmq.auth.create_certificates, which writes it to NAME.key_secret"
        )
    return ClusterKey(public.decode(), secret.decode())


def is_pair(public: str, secret: str) -> bool:
    """Whether these are a secret key and the public key that belongs to it."""
    try:
        return len(z85.decode(secret)) == _KEY_BYTES and zmq.curve_public(secret.encode("ascii")).decode() == public
    except (ValueError, TypeError, KeyError, zmq.ZMQError, UnicodeEncodeError):
        return False


def write_key(path: Path, key: ClusterKey) -> Path:
    """Writes a pair where `read_key` finds it, with mode 0600 from the first byte on; returns `path`."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_certificate(key))
    return path


def key_in_memory(key: ClusterKey) -> Path:
    """A file for `read_key` that is on no disk and lasts as long as this process."""
    descriptor = os.memfd_create("cluster-key", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, _certificate(key).encode())
    return Path(f"/proc/self/fd/{descriptor}")


def _certificate(key: ClusterKey) -> str:
    return f'curve\n    public-key = "{key.public}"\n    secret-key = "{key.secret}"\n'
