"""Checks of who could reach what a configuration serves, before any process starts."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.preflight.problems import Problem
from cluster.trust import KeyFileError, read_key

API_KEY_VARIABLE = "VLLM_API_KEY"


def security_problems(config: ClusterConfig, environ: Mapping[str, str]) -> list[Problem]:
    """A key file that cannot be used, and an API server that others could use and order about without a key."""
    problems = []
    if config.security.key_file:
        try:
            read_key(Path(config.security.key_file).expanduser())
        except KeyFileError as error:
            problems.append(Problem("security.key_file", str(error), "Correct that, or leave it out for a new key"))
    server = config.server
    is_reachable = not server.options.get("uds") and not is_of_this_machine(server.host)
    has_key = any(api_keys(config)) or environ.get(API_KEY_VARIABLE)
    if is_reachable and not has_key and not server.open_to_all:
        problems.append(
            Problem(
                "server.options.api_key",
                f"server.host={server.host} can be reached from other machines and no API key is set, so anybody there "
                "could send requests, drain workers and read the metrics",
                "Set server.options.api_key, or server.host=127.0.0.1, or, where something in front of it asks for "
                "keys, server.open_to_all=true",
            )
        )
    return problems


def api_keys(config: ClusterConfig) -> list[str]:
    """Of `server.options`, which takes one or a list."""
    given = config.server.options.get("api_key") or []
    return [str(key) for key in (given if isinstance(given, list) else [given])]


def is_of_this_machine(host: str) -> bool:
    """Whether only processes of this machine reach a server at that address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
