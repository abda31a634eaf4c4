"""What every part of the configuration is made of."""

from pydantic import BaseModel, ConfigDict


class ConfigNode(BaseModel):
    """A part of the tree: unknown fields are errors, values cannot be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def one_or_many(value: object) -> object:
    """As vLLM's `api_key` option: one text, or a list; YAML may have read a key of digits as a number."""
    values = value if isinstance(value, list) else [value]
    return [str(item) if type(item) in (int, float) else item for item in values]
