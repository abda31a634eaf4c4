"""Which class a request belongs to: the header's, else its API key's, else its model name's, else the default.

A class with API keys is for these keys only, also when the header asks for it. Keys are kept as digests.
"""

import hashlib
from collections.abc import Mapping

from cluster.configuration.slo import DEFAULT_CLASS, SloConfig
from proxy.scheduling.slo import SloClass, Standing, made_to_yield

TENANT_DIGITS = 16


class UnknownClass(ValueError):
    """The header names no class."""


class ClassOfOthers(ValueError):
    """The header names a class that is kept for other API keys."""


class SloRules:
    """The configured classes, ready to be asked."""

    def __init__(self, config: SloConfig) -> None:
        self.priority_range = config.priority_range
        """A request's own priority lies between minus this and this."""
        default = SloClass(DEFAULT_CLASS, config.ttft_s, config.itl_s, config.on_overload)
        others = (
            SloClass(
                name,
                default.ttft_s if kind.ttft_s is None else kind.ttft_s,
                default.itl_s if kind.itl_s is None else kind.itl_s,
                default.on_overload if kind.on_overload is None else kind.on_overload,
            )
            for name, kind in config.classes.items()
        )
        self.classes: Mapping[str, SloClass] = {each.name: each for each in made_to_yield([default, *others])}
        self._priorities = {name: kind.priority for name, kind in config.classes.items()}
        self._by_key = {
            _digest(key.get_secret_value()): name for name, kind in config.classes.items() for key in kind.api_keys
        }
        self._by_model = {model: name for name, kind in config.classes.items() for model in kind.models}
        self._for_keys = frozenset(self._by_key.values())

    @property
    def needs_model(self) -> bool:
        """Whether the model's name can decide."""
        return bool(self._by_model)

    def standing(self, header: str = "", api_key: str = "", model: str = "") -> Standing:
        """Of a request, from what it says of itself; empty: nothing.

        Raises `UnknownClass` or `ClassOfOthers` with a sentence for the client.
        """
        digest = _digest(api_key) if api_key else ""
        own = self._by_key.get(digest)
        name = header or own or self._by_model.get(model) or DEFAULT_CLASS
        if name not in self.classes:
            known = ", ".join(each for each in self.classes if self._may_use(each, own))
            raise UnknownClass(f"X-Slo-Class is {header[:64]!r}, but there is no such class; use one of: {known}")
        if header and not self._may_use(header, own):
            raise ClassOfOthers(f"X-Slo-Class is {header!r}, a class for API keys of its own; use another class or key")
        return Standing(self.classes[name], self._priorities.get(name, 0), digest[:TENANT_DIGITS])

    def _may_use(self, name: str, own: str | None) -> bool:
        return name == own or name not in self._for_keys


def tenant_of(api_key: str) -> str:
    """How requests with this key are told from others, without the key."""
    return _digest(api_key)[:TENANT_DIGITS]


def _digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()
