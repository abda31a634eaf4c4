"""The configuration of several models behind one address.

`models_file.py` reads it. What a model's own cluster is like stands below `cluster`, with the fields of
`cluster/config.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from cluster.configuration.address import AddressConfig
from cluster.configuration.node import ApiKeys, ConfigNode, Environment

Policy = Literal["pinned", "on_demand", "scale_to_zero"]
OnStarting = Literal["wait", "reject"]

# A slash separates parts, as in names of the Hugging Face hub; none is empty, so that a name can stand in a path.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*)*$"
ModelName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=128)]


class ModelConfig(ConfigNode):
    """One model: its cluster, and when that is up. Times in seconds."""

    cluster: dict[str, Any] = Field(
        default_factory=dict, description="Its cluster, with the fields of a cluster's own configuration file."
    )
    config: str | None = Field(
        default=None, description="A file with these fields instead; a relative path starts at this file's directory."
    )
    policy: Policy = Field(
        default="pinned",
        description="pinned: always up. on_demand: started by a request, ends when another needs its place. "
        "scale_to_zero: the same, and it ends after idle_s without a request.",
    )
    cost: int = Field(default=1, ge=1, description="What it takes of `capacity` while it is up, e.g. its GPUs.")
    min_residency_s: float = Field(
        default=60.0, ge=0, description="Once up, it keeps its place against other models for at least so long."
    )
    idle_s: float = Field(default=300.0, gt=0, description="With scale_to_zero: ends after so long without a request.")
    on_starting: OnStarting = Field(
        default="wait", description="What happens to a request while it is not up: it waits, or gets a 503 at once."
    )
    start_wait_s: float = Field(
        default=120.0, gt=0, description="A request waits so long for it at most, and then gets a 503."
    )
    sleep: bool = Field(
        default=False,
        description="When it gives up its place its engines sleep (vLLM's sleep mode, on GPUs): weights wait in the "
        "host's memory, and it is up again in seconds.",
    )
    wake_timeout_s: float = Field(
        default=60.0, gt=0, description="With sleep: one that is not awake by then is stopped and started instead."
    )
    env: Environment = Field(
        default_factory=dict, description="Environment of its processes, e.g. CUDA_VISIBLE_DEVICES."
    )

    @model_validator(mode="after")
    def _who_sleeps_gives_up_its_place(self) -> "ModelConfig":
        if self.sleep and self.policy == "pinned":
            raise ValueError("sleep is set and a pinned model is always up; set policy=on_demand, or remove sleep")
        return self

    @model_validator(mode="after")
    def _its_cluster_is_given_once(self) -> "ModelConfig":
        if self.config is not None and self.cluster:
            raise ValueError("config and cluster are both given; leave one of them")
        return self


class FrontConfig(AddressConfig):
    """The address of all models."""

    api_key: ApiKeys = Field(
        default_factory=list,
        description="Keys of which every request needs one. Empty: VLLM_API_KEY, or none.",
    )
    admin_key: ApiKeys = Field(
        default_factory=list,
        description="Keys for orders: /admin, where models are added with whatever options and environment, and orders "
        "about workers and LoRA adapters. They are good for everything else too. Empty: those of api_key.",
    )
    ssl_certfile: str | None = Field(default=None, description="Certificate, to serve https.")
    ssl_keyfile: str | None = Field(default=None, description="Its key.")
    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="A request with a larger body gets a 413.")

    @model_validator(mode="after")
    def _a_certificate_has_a_key(self) -> "FrontConfig":
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both or none")
        return self


class ModelsConfig(ConfigNode):
    """Everything about several models behind one address. Times in seconds."""

    models: dict[ModelName, ModelConfig] = Field(
        description="The models, by the names under which clients ask for them."
    )
    capacity: int | None = Field(
        default=None, ge=1, description="Sum of `cost` of the models that may be up at once. Empty: no limit."
    )
    added_models: str | None = Field(
        default=None,
        description="A file that remembers models added while it serves; a relative path starts at this file's "
        "directory. Empty: they are forgotten when the server ends.",
    )
    server: FrontConfig = Field(default_factory=FrontConfig, description="The address of all of them.")
    max_waiting: int = Field(
        default=256, ge=1, description="Requests that may wait for one model to be up; the next one gets a 429."
    )
    max_asleep: int = Field(
        default=1,
        ge=0,
        description="Models that sleep, or have slept since they were started: the host keeps the memory for their "
        "weights, once per worker. Others are stopped instead.",
    )
    drain_timeout_s: float = Field(
        default=120.0, gt=0, description="A model that is removed breaks off what it has not finished by then."
    )
    silent_after_s: float = Field(
        default=60.0, gt=0, description="A model whose API server is silent for so long is killed and started again."
    )
