"""The part of the configuration that lets pools grow and shrink by themselves."""

from pydantic import Field, model_validator

from cluster.configuration.node import ConfigNode


class PoolBoundsConfig(ConfigNode):
    """How many workers a pool may have. On CPUs, cores are kept free for `max` of them from the start."""

    min: int = Field(default=1, ge=0, le=1024, description="Workers that always stay; at least one decodes.")
    max: int | None = Field(
        default=None, ge=1, le=1024, description="No more than that. Empty: as many as there are GPUs or cores for."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "PoolBoundsConfig":
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max={self.max} is less than min={self.min}; raise it, or lower min")
        return self


class AutoscaleConfig(ConfigNode):
    """When pools grow and shrink. The targets are those of `slo` and its classes. Times in seconds."""

    enabled: bool = Field(default=False, description="Let the number of workers follow the load.")
    prefill: PoolBoundsConfig = Field(default_factory=PoolBoundsConfig, description="Bounds of the prefill pool.")
    decode: PoolBoundsConfig = Field(default_factory=PoolBoundsConfig, description="Bounds of the decode pool.")
    goal: float = Field(
        default=0.96, gt=0.5, lt=1, description="Share of requests that are to be within each target of their class."
    )
    every_s: float = Field(default=5.0, gt=0, le=60, description="How often the load is looked at.")
    window_s: float = Field(
        default=60.0, gt=0, description="Over which load is measured to grow; a jump is seen in a quarter of it."
    )
    hold_s: float = Field(
        default=300.0, gt=0, description="Over which a smaller pool must have been enough before one shrinks."
    )
    margin: float = Field(
        default=0.08,
        ge=0,
        le=1,
        description="A pool shrinks when fewer workers are enough for so much more than comes; one that changes gets "
        "room for half of it.",
    )

    @model_validator(mode="after")
    def _spans_contain_each_other(self) -> "AutoscaleConfig":
        if not 4 * self.every_s <= self.window_s <= self.hold_s:
            raise ValueError(
                f"every_s={self.every_s:g}, window_s={self.window_s:g} and hold_s={self.hold_s:g} do not fit: a window "
                "holds at least four looks, and hold_s is no shorter than the window"
            )
        return self
