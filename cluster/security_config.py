"""The part of the configuration that says who may connect to whom."""

from pydantic import Field, field_validator

from cluster.config_node import ConfigNode


class SecurityConfig(ConfigNode):
    """The sockets between the cluster's processes. Whatever of them listens on tcp asks for the cluster's key."""

    key_file: str = Field(
        default="",
        description="File (mode 0600) with the cluster's key, as `zmq.auth.create_certificates` writes it "
        "(NAME.key_secret). Empty: a key for this run alone.",
    )
    workers_host: str = Field(
        default="",
        description="IPv4 address of this machine on which the proxy listens for workers (tcp), for workers on other "
        "machines. Empty: a private ipc socket.",
    )
    workers_port: int = Field(default=0, ge=0, le=65535, description="Port for that. 0: a free one.")

    @field_validator("workers_host")
    @classmethod
    def _workers_can_call_there(cls, host: str) -> str:
        return one_address(host)


def one_address(host: str) -> str:
    """An address to bind that others are told; raises `ValueError` for one that means every interface."""
    if host in ("0.0.0.0", "::", "*"):
        raise ValueError(f"{host} is no address to call; give the one by which other machines reach this one")
    return host
