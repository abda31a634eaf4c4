"""Classes of requests and what each may expect."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.configuration.node import ApiKeys, ConfigNode, one_or_many

OverloadPolicy = Literal["queue", "demote", "reject"]

DEFAULT_CLASS = "default"
RESERVED_CLASSES = {DEFAULT_CLASS: "its targets are slo.ttft_s and slo.itl_s", "probe": "it is that of /ready"}


class SloClassConfig(ConfigNode):
    """One class of requests. What is left out is as in the default class."""

    ttft_s: float | None = Field(default=None, gt=0, description="Time to first token, in seconds.")
    itl_s: float | None = Field(default=None, gt=0, description="Time between tokens, in seconds.")
    on_overload: OverloadPolicy | None = Field(
        default=None, description="If its first token cannot come in time: wait, go behind all others, or 503."
    )
    priority: int = Field(
        default=0, ge=-1000, le=1000, description="Lower goes first, as in vLLM; a request's own `priority` is added."
    )
    api_keys: ApiKeys = Field(
        default_factory=list, description="Requests with one of these keys belong to the class, and no others may."
    )
    models: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(one_or_many)] = Field(
        default_factory=list, description="Further names of the model; requests that use one belong to the class."
    )


class SloConfig(ConfigNode):
    """What a request may expect. Seconds. The values here are those of the class `default`."""

    ttft_s: float = Field(default=3.0, gt=0, description="Time to first token.")
    itl_s: float = Field(
        default=0.1,
        gt=0,
        description="Time between tokens; one of a hundred gaps of a request may be longer. Also bounds the prompt "
        "tokens that a decode worker computes beside others' decodes.",
    )
    on_overload: OverloadPolicy = Field(
        default="demote", description="If the first token cannot come in time: wait, go behind all others, or 503."
    )
    priority_range: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="A request's own `priority` may be from minus this to this, else 400; 0: no request may have one.",
    )
    classes: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], SloClassConfig] = Field(
        default_factory=dict, description="Further classes by name; a request says which with the header X-Slo-Class."
    )

    @model_validator(mode="after")
    def _nobody_belongs_to_two_classes(self) -> "SloConfig":
        for name, why in RESERVED_CLASSES.items():
            if name in self.classes:
                raise ValueError(f"the class name {name!r} is taken, {why}; choose another one")
        _unique("models", ((name, model) for name, kind in self.classes.items() for model in kind.models))
        keys = ((name, key.get_secret_value()) for name, kind in self.classes.items() for key in kind.api_keys)
        _unique("api_keys", keys, secret=True)
        return self


def _unique(field: str, given: Iterable[tuple[str, str]], secret: bool = False) -> None:
    """Raises `ValueError` if a value is given twice, in one class or in two."""
    owners: dict[str, str] = {}
    for name, value in given:
        if value in owners:
            what = "a key" if secret else f"{value!r}"
            raise ValueError(
                f"{what} is given twice, in slo.classes.{owners[value]}.{field} and in slo.classes.{name}.{field}; "
                "leave it in one of them"
            )
        owners[value] = name
