"""What every part of the configuration is made of."""

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
)

WITH_KEYS = {"with_keys": True}
"""Context of a serialisation that another process of the cluster reads, from a file of mode 0600."""


class ConfigNode(BaseModel):
    """A part of the tree: unknown fields are errors, values cannot be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _digits_are_text(value: object) -> object:
    """YAML reads digits as numbers."""
    if isinstance(value, dict):
        return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}
    return value


def _a_process_can_have_it(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be set; a name is not empty and has no '=', and NUL stands nowhere")
    return env


Environment = Annotated[dict[str, str], BeforeValidator(_digits_are_text), AfterValidator(_a_process_can_have_it)]
"""Variables of a process, by name."""


def one_or_many(value: object) -> object:
    """As vLLM's `api_key` option: one text, or a list; YAML may have read a key of digits as a number."""
    values = value if isinstance(value, list) else [value]
    return [str(item) if type(item) in (int, float) else item for item in values]


def _as_json(key: SecretStr, info: SerializationInfo) -> str:
    return key.get_secret_value() if info.context == WITH_KEYS else str(key)


ApiKeys = Annotated[
    list[Annotated[SecretStr, Field(min_length=1), PlainSerializer(_as_json, when_used="json")]],
    BeforeValidator(one_or_many),
]
"""Keys of clients. They are shown as asterisks, except `WITH_KEYS`."""
