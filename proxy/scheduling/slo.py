"""What a request may expect: the class it belongs to, its rank among others, and whose it is."""

from dataclasses import dataclass, field
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
