"""The address that the API server listens on."""

import socket

from cluster.config import ServerConfig


class ListenError(Exception):
    """The address cannot be used; a sentence for the operator."""


def listening_socket(server: ServerConfig) -> socket.socket:
    """Bound before anything is started, so that a port that is taken is known at once; nobody is accepted yet."""
    unix_path = server.options.get("uds")
    family = socket.AF_UNIX if unix_path else socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not unix_path:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(str(unix_path) if unix_path else (server.host, server.port))
    except OSError as error:
        listening.close()
        where = (
            f"{unix_path} (server.options.uds)"
            if unix_path
            else f"{server.host}:{server.port} (server.host, server.port)"
        )
        raise ListenError(f"cannot listen on {where}: {error.strerror}; choose another address or port") from error
    return listening
