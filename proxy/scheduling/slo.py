"""What a request may expect: the class it belongs to, its rank among others, and whose it is."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

OverloadPolicy = Literal["reject", "demote", "queue"]
"""What happens to a request whose time to first token cannot be met: 503, behind all others, or nothing."""


@dataclass(frozen=True, slots=True)
class SloClass:
    """Targets that requests of one kind share."""

    name: str = "default"
    ttft_s: float = 3.0
    """Time to first token, from arrival at the proxy."""
    itl_s: float = 0.1
    """Longest gap between tokens."""
    on_overload: OverloadPolicy = "demote"
    longest_step_s: float = inf
    """An engine's step on its prompts ends within this, so that those of stricter classes need not wait for long."""


YIELD_PART = 0.5
"""Part of a stricter class's time to first token that may go by until the step that it meets has ended; the rest is for
its own prompt."""


def made_to_yield(classes: Iterable[SloClass]) -> list[SloClass]:
    """The same classes; the steps of each are as short as those that are stricter need them."""
    given = list(classes)
    strictest_s = min((each.ttft_s for each in given), default=inf)
    return [
        replace(each, longest_step_s=YIELD_PART * strictest_s if each.ttft_s > strictest_s else inf) for each in given
    ]


PROBE = SloClass(name="probe", on_overload="queue")
"""The class of the proxy's own requests, which are not counted and must go through both pools."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request may expect, apart from its shape."""

    slo: SloClass = field(default_factory=SloClass)
    priority: int = 0
    """Lower goes first, as in vLLM; deadlines decide between equals."""
    tenant: str = ""
    """Whose request it is: a digest of the API key, never the key. Tenants share fairly."""


DEFAULT_STANDING = Standing()
