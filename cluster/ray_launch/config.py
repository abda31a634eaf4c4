"""What a configuration says about Ray."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Amount = Annotated[float, Field(gt=0)]


class RayConfig(BaseModel):
    """With `launch: ray`. Times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        default="auto", description="HOST:PORT of the Ray cluster's head; `auto`: the cluster that this machine is in."
    )
    cpus_per_rank: float = Field(
        default=1.0, ge=0, description="CPUs that a worker claims from Ray per rank; on CPUs also its compute threads."
    )
    resources: dict[Literal["prefill", "decode"], dict[str, Amount]] = Field(
        default_factory=dict,
        description="Further resources of Ray that each worker of a pool claims, with across_nodes each rank, e.g. "
        "{decode: {large_memory: 1}}.",
    )
    claim_timeout_s: float = Field(
        default=60.0, gt=0, description="A start fails if Ray has no room for a worker for so long."
    )

    @field_validator("address")
    @classmethod
    def _the_proxy_is_part_of_the_cluster(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(
                f"address={address} is for clients outside of the Ray cluster, and workers must reach this machine; "
                "run twinpool on a node of the cluster, with address=auto or HOST:PORT of its head"
            )
        host, colon, port = address.rpartition(":")
        if address != "auto" and not (host and colon and port.isdigit()):
            raise ValueError(f"address={address!r} is neither `auto` nor HOST:PORT; give e.g. 10.0.0.1:6379")
        return address
