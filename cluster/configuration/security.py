"""The parts of the configuration that say who may connect to whom, and who may ask for how much."""

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from cluster.configuration.node import ApiKeys, ConfigNode


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


class KeyLimitsConfig(ConfigNode):
    """Limits of some API keys, each of which has them for itself. What is left out is as for all keys."""

    api_keys: ApiKeys = Field(min_length=1, description="The keys.")
    requests_per_minute: int | None = Field(default=None, ge=0, description="As for all keys. 0: any number.")
    tokens_per_minute: int | None = Field(default=None, ge=0, description="As for all keys. 0: any number.")


class RateLimitsConfig(ConfigNode):
    """How much one API key may ask for in a minute; more is answered 429."""

    requests_per_minute: int = Field(default=0, ge=0, description="Requests; each prompt of a list is one. 0: any.")
    tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description="Tokens of prompts and answers. A request reserves max_tokens when it comes and gives back at its "
        "end what it did not use. 0: any number.",
    )
    keys: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], KeyLimitsConfig] = Field(
        default_factory=dict, description="Keys with limits of their own, under a name for the metrics."
    )

    @model_validator(mode="after")
    def _every_key_has_one_limit(self) -> "RateLimitsConfig":
        if "default" in self.keys:
            raise ValueError("the name 'default' stands for all other keys; choose another one")
        owners: dict[str, str] = {}
        for name, limits in self.keys.items():
            for key in limits.api_keys:
                if (owner := owners.setdefault(key.get_secret_value(), name)) != name:
                    raise ValueError(f"a key is given twice, in {owner} and in {name}; leave it in one of them")
        return self
