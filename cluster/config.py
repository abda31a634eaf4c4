"""The configuration of a cluster: one typed tree, validated at the edge, passed down as the sub-tree each part needs.

`config_file.py` reads it from a YAML file and from overrides; `config_checks.py` checks what needs this machine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.configuration.address import AddressConfig
from cluster.configuration.autoscale import AutoscaleConfig
from cluster.configuration.node import ConfigNode, Environment
from cluster.configuration.security import RateLimitsConfig, SecurityConfig, one_address
from cluster.configuration.slo import SloConfig
from cluster.ray_launch.config import RayConfig

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
LinkName = Literal["cuda_ipc", "nccl", "host", "zmq"]
ChunkOrder = Literal["deadline", "arrival"]

# vLLM's own defaults do not matter here: every value is passed explicitly or not at all.
EngineOptions = dict[str, Any]

# Engine options that the cluster sets itself, and what to do instead of giving them.
OWNED_ENGINE_OPTIONS: dict[str, str] = {
    "model": "Set `model` instead",
    "served_model_name": "Set `served_model_name` instead",
    "tensor_parallel_size": "Set `pools.prefill.tensor_parallel` or `pools.decode.tensor_parallel` instead",
    "data_parallel_size": "Set `pools.prefill.replicas` or `pools.decode.replicas` instead",
    "kv_transfer_config": "Remove it: twinpool sets the connector itself, from `transfer`",
    "kv_events_config": "Remove it: workers read their engine's events themselves; see scheduling.prefix_events",
    "scheduler_cls": "Remove it: twinpool has its own; see `scheduling.chunk_order`",
    "pipeline_parallel_size": "Remove it: use tensor_parallel, workers with pipeline stages are not supported yet",
}

# Engine options under which tokens or blocks go ways that a hand-over does not follow, and what they do. None, and
# context parallelism over one rank, are no such thing.
UNTESTED_ENGINE_OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "With speculative decoding a prompt ends in draft tokens, where a hand-over has the first token",
    ),
    "kv_offloading_size": "Offloading the KV cache puts vLLM's own connector in the place of twinpool's, and nothing "
    "would be handed over",
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size"),
        "With context parallelism a rank holds every n-th token, and a hand-over takes its blocks for whole ones",
    ),
}

# Engine options that the proxy and both pools must agree on, so they are given once, at the top.
SHARED_ENGINE_OPTIONS = frozenset({
    "max_model_len", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "revision",
    "hf_overrides", "trust_remote_code", "generation_config", "max_logprobs", "enable_lora",
})  # fmt: skip


class PoolConfig(ConfigNode):
    """The workers of one role."""

    replicas: int = Field(default=1, ge=0, le=1024, description="How many workers of this role.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=1024, description="Ranks per worker (vLLM's tensor_parallel_size)."
    )
    across_nodes: bool = Field(
        default=False,
        description="With `launch: ray`: the ranks of one worker may be on several nodes. Otherwise all are on one.",
    )
    engine: EngineOptions = Field(
        default_factory=dict,
        description="vLLM engine options for this role, by vLLM's own names; they win over the top-level `engine`.",
    )
    env: Environment = Field(
        default_factory=dict,
        description="Environment variables of these workers, e.g. CUDA_VISIBLE_DEVICES; they win over twinpool's.",
    )
    niceness: int = Field(
        default=10,
        ge=0,
        le=19,
        description="How far these workers step back for other processes where they compute on CPUs; 0: not at all.",
    )


class PoolsConfig(ConfigNode):
    """Both pools."""

    prefill: PoolConfig = Field(default_factory=PoolConfig, description="Workers that compute prompts.")
    decode: PoolConfig = Field(default_factory=PoolConfig, description="Workers that generate tokens.")

    def of(self, role: Role) -> PoolConfig:
        """The pool of a role."""
        return self.prefill if role == "prefill" else self.decode


class TransferConfig(ConfigNode):
    """How KV blocks move from a prefill to a decode worker. Times in seconds."""

    links: Annotated[list[LinkName], Field(min_length=1)] = Field(
        default=["cuda_ipc", "nccl", "host", "zmq"], description="Links that may be used, best first."
    )
    lease_first_s: float = Field(default=30.0, gt=0, description="How long blocks are held before the first renewal.")
    beat_s: float = Field(default=5.0, gt=0, description="How often a lease is renewed.")
    lease_renew_s: float = Field(default=20.0, gt=0, description="How long a renewal holds the blocks.")
    peer_heartbeat_s: float = Field(default=1.0, gt=0, description="Heartbeat between ranks.")
    peer_lost_after_s: float = Field(default=5.0, gt=0, description="A silent rank counts as lost after this time.")
    chunk_bytes: int = Field(default=5 << 20, ge=4096, le=64 << 20, description="Bytes of one message on link `zmq`.")
    fetch_window: int = Field(default=3, ge=1, le=64, description="Messages under way per peer on link `zmq`.")
    announce_layers: int = Field(
        default=0,
        ge=0,
        description="Announce so many layers at a time during a prompt's last chunk, so that less is left to copy "
        "when it ends. 0: announce whole chunks.",
    )
    verify: Literal["off", "sample", "all"] = Field(
        default="off",
        description="Compare checksums of copied blocks with the prefill worker's: none, one of eight, or every one.",
    )
    bind_host: str = Field(
        default="", description="Address ranks listen on (tcp). Empty: private ipc sockets, for workers on one host."
    )

    @field_validator("bind_host")
    @classmethod
    def _ranks_can_be_called_there(cls, host: str) -> str:
        return one_address(host)

    @model_validator(mode="after")
    def _leases_outlive_beats(self) -> "TransferConfig":
        if self.beat_s >= min(self.lease_first_s, self.lease_renew_s):
            raise ValueError(
                f"beat_s={self.beat_s} must be shorter than lease_first_s={self.lease_first_s} and "
                f"lease_renew_s={self.lease_renew_s}, or every lease runs out before it is renewed"
            )
        if self.peer_heartbeat_s >= self.peer_lost_after_s:
            raise ValueError(
                f"peer_heartbeat_s={self.peer_heartbeat_s} must be shorter than "
                f"peer_lost_after_s={self.peer_lost_after_s}, or live ranks count as lost"
            )
        return self


class SchedulingConfig(ConfigNode):
    """Where requests go."""

    remote_prefill_min_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Prompts with fewer uncached tokens are prefilled on the decode worker."
    )
    on_no_prefill: Literal["local", "queue", "reject"] = Field(
        default="local", description="What happens to a request while no prefill worker is alive."
    )
    reserve: Literal["at_prefill_start", "at_prefill_end"] = Field(
        default="at_prefill_start", description="When the decode worker reserves the blocks of a request."
    )
    chunk_order: ChunkOrder = Field(
        default="deadline",
        description="Whose chunk an engine computes next: the most urgent prompt's, or vLLM's own order.",
    )
    queue_timeout_s: float = Field(
        default=300.0, gt=0, description="A request that has waited so long for room at a worker is answered 504."
    )
    absent_timeout_s: float = Field(
        default=30.0, gt=0, description="The same, while no worker is there that could take it at all."
    )
    prefix_events: bool = Field(
        default=True, description="Workers tell the proxy which prompts' blocks their prefix caches hold."
    )
    max_losses: int = Field(
        default=3,
        ge=1,
        le=100,
        description="A request that loses its workers so many times in a row, without a new token in between, fails.",
    )
    max_queued_requests: int = Field(
        default=1000, ge=1, description="Requests that may wait in the proxy; the next one is answered 429."
    )
    prior_prefill_tokens_per_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto", description="What a worker is believed to prefill until it has been watched doing it."
    )
    prior_decode_step_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto", description="How long a decode step is believed to take until then, in seconds."
    )


class ServerConfig(AddressConfig):
    """The API server."""

    api_servers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that accept requests, tokenize, and stream answers, all over the same workers.",
    )
    rate_limits: RateLimitsConfig = Field(
        default_factory=RateLimitsConfig, description="How much one API key may ask for in a minute."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's frontend flags by name, e.g. api_key, enable_auto_tool_choice."
    )


class LivenessConfig(ConfigNode):
    """When a silent process counts as dead. Seconds."""

    heartbeat_s: float = Field(
        default=1.0, gt=0, description="How often hosts and the proxy tell each other they live."
    )
    dead_after_s: float = Field(default=5.0, gt=0, description="The proxy gives up a worker silent for this long.")
    proxy_lost_after_s: float = Field(
        default=5.0, gt=0, description="A worker drops the requests of a proxy so silent."
    )
    stalled_after_s: float = Field(
        default=60.0,
        gt=0,
        description="/health fails if a worker has work and gets nowhere for so long; longer than a chunk takes.",
    )
    ready_within_s: float = Field(
        default=30.0, gt=0, description="/ready asks for an answer through both pools so recent, or makes one."
    )

    @model_validator(mode="after")
    def _beats_fit_into_the_deadlines(self) -> "LivenessConfig":
        if self.heartbeat_s >= min(self.dead_after_s, self.proxy_lost_after_s):
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s} must be shorter than dead_after_s={self.dead_after_s} and "
                f"proxy_lost_after_s={self.proxy_lost_after_s}, or live processes count as dead"
            )
        return self


class SimulationConfig(ConfigNode):
    """What simulated engines cost. The defaults resemble a 70B model on four large GPUs per worker."""

    enabled: bool = Field(default=False, description="Set by `engine: simulated`; not meant to be given by hand.")
    speed: Literal["modelled", "instant"] = Field(
        default="modelled", description="`instant`: engines and transfers cost nothing, whatever is given below."
    )
    time_scale: float = Field(
        default=1.0, gt=0, le=1000, description="How many times faster than the modelled hardware everything runs."
    )
    prefill_tokens_per_s: float = Field(default=8000.0, gt=0, description="Prompt tokens that one worker computes.")
    chunk_s: float = Field(default=0.005, ge=0, description="Fixed seconds of a step that computes prompt tokens.")
    attention_s_per_pair: float = Field(
        default=2e-10, ge=0, description="Seconds per pair of a prompt token and a token before it: the quadratic part."
    )
    decode_step_s: float = Field(default=0.02, ge=0, description="Fixed seconds of a step that generates tokens.")
    decode_s_per_sequence: float = Field(default=5e-5, ge=0, description="Seconds more per sequence in that step.")
    decode_s_per_kv_token: float = Field(default=1e-8, ge=0, description="Seconds more per token of their KV.")
    jitter: float = Field(
        default=0.0, ge=0, lt=1, description="Steps and transfers take up to this share more or less, at random."
    )
    seed: int = Field(default=0, description="Of that randomness.")
    num_blocks: int = Field(default=8192, ge=1, description="KV blocks of a worker.")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens per KV block.")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Tokens of one step, prompts and decodes.")
    max_num_seqs: int = Field(default=256, ge=1, description="Sequences that run at once on a worker.")
    max_model_len: int | None = Field(
        default=None, ge=8, description="Tokens of prompt and answer. Empty: what the model and the blocks allow."
    )
    prefix_caching: bool = Field(default=True, description="Blocks of a known prompt cost nothing.")
    eos_every: int = Field(
        default=200, ge=0, description="About one generated token in so many ends the answer. 0: none does."
    )
    kv_bytes_per_token: int = Field(default=327_680, ge=0, description="Bytes to transfer per prompt token.")
    transfer_gb_per_s: float = Field(default=20.0, gt=0, description="At which a decode worker receives, in 1e9.")
    start_s: float = Field(default=0.0, ge=0, description="Seconds until a worker is up.")
    wake_s: float = Field(default=2.0, ge=0, description="Seconds until a worker that sleeps is up again.")
    workers_per_process: int = Field(
        default=16,
        ge=1,
        le=256,
        description="Workers of one process, which die together. 1: each has its own.",
    )


class ClusterConfig(ConfigNode):
    """Everything about a cluster."""

    model: str | None = Field(
        default=None, description="Directory of a model, or a name vLLM can resolve. Empty: the embedded SmolLM2-135M."
    )
    served_model_name: str | None = Field(default=None, description="Name in the API. Empty: the model's own name.")
    engine: EngineOptions = Field(
        default_factory=dict,
        description="vLLM engine options of every worker and of the proxy, by vLLM's own names; or the word "
        "`simulated`: no engines, workers with a cost model in their place.",
    )
    simulation: SimulationConfig = Field(
        default_factory=SimulationConfig, description="With `engine: simulated`: what the engines cost."
    )
    pools: PoolsConfig = Field(default_factory=PoolsConfig, description="The workers.")
    launch: Literal["local", "ray"] = Field(
        default="local", description="Where workers run: on this machine, or on the nodes of a Ray cluster."
    )
    ray: RayConfig = Field(default_factory=RayConfig, description="With `launch: ray`: the cluster and the claims.")
    transfer: TransferConfig = Field(default_factory=TransferConfig, description="Moving KV blocks.")
    scheduling: SchedulingConfig = Field(default_factory=SchedulingConfig, description="Placing requests.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The API server.")
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Who may connect to whom.")
    slo: SloConfig = Field(default_factory=SloConfig, description="Latency targets.")
    liveness: LivenessConfig = Field(default_factory=LivenessConfig, description="Noticing dead processes.")
    start_timeout_s: float = Field(default=600.0, gt=0, description="Start-up fails when a worker takes longer.")
    stop_timeout_s: float = Field(default=15.0, ge=0, description="Workers are killed when stopping takes longer.")
    drain_timeout_s: float = Field(
        default=120.0, gt=0, description="A draining worker aborts what it has not finished by then."
    )
    autoscale: AutoscaleConfig = Field(
        default_factory=AutoscaleConfig, description="Numbers of workers that follow the load."
    )
    restart: Literal["on_failure", "never", "always"] = Field(
        default="on_failure",
        description="When a worker's process is started again: after a failure, never, or also after a SIGTERM.",
    )

    @model_validator(mode="before")
    @classmethod
    def _simulated_is_a_kind_of_engine(cls, tree: object) -> object:
        if not isinstance(tree, Mapping) or tree.get("engine") != "simulated":
            return tree
        simulation = tree.get("simulation")
        if simulation is not None and not isinstance(simulation, Mapping):
            return {**tree, "engine": {}}
        return {**tree, "engine": {}, "simulation": {**(simulation or {}), "enabled": True}}

    @model_validator(mode="after")
    def _nobody_pays_attention_to_a_simulation_that_is_off(self) -> "ClusterConfig":
        if self.simulation.enabled:
            options = [role for role in ROLES if self.pools.of(role).engine]
            if self.engine or options:
                where = "engine" if self.engine else f"pools.{options[0]}.engine"
                raise ValueError(
                    f"simulated engines take no vLLM options, found some in {where}; use the fields of simulation"
                )
        elif self.simulation != SimulationConfig():
            raise ValueError("simulation is given and the engines are real; set engine=simulated, or remove simulation")
        return self

    @model_validator(mode="after")
    def _pools_begin_within_their_bounds(self) -> "ClusterConfig":
        for role in ROLES if self.autoscale.enabled else ():
            bounds, replicas = getattr(self.autoscale, role), getattr(self.pools, role).replicas
            if not bounds.min <= replicas <= (bounds.max or replicas):
                raise ValueError(
                    f"pools.{role}.replicas={replicas} is not between autoscale.{role}.min={bounds.min} and "
                    f"autoscale.{role}.max={bounds.max}; begin with a number that is"
                )
        return self

    @model_validator(mode="after")
    def _ray_is_asked_for(self) -> "ClusterConfig":
        if self.launch != "ray" and self.ray != RayConfig():
            raise ValueError("ray is given and launch is local; set launch=ray, or remove ray")
        for role in ROLES:
            if not self.pools.of(role).across_nodes:
                continue
            if self.launch != "ray":
                raise ValueError(
                    f"pools.{role}.across_nodes is given and launch is local, where there is one node; set launch=ray, "
                    "or remove it"
                )
            if self.simulation.enabled:
                raise ValueError(f"pools.{role}.across_nodes is for engines, and these are simulated; remove it")
        return self

    @model_validator(mode="after")
    def _someone_decodes(self) -> "ClusterConfig":
        if self.pools.decode.replicas == 0:
            raise ValueError("pools.decode.replicas=0: nobody would generate tokens; set it to 1 or more")
        return self
