"""How much each API key may ask for in a minute: requests, and tokens of prompts and answers.

The counting is the library `limits`': two windows of a minute, the older one weighted by how much of it still counts. A
request reserves its prompt and the longest answer it may have when it comes; what it did not use is given back when it
ends. The dispatcher asks, so all API servers share one count.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from cluster.configuration.security import RateLimitsConfig
from proxy.flights.events import Cause
from proxy.slo.rules import tenant_of

WINDOW_S = 60
DEFAULT = "default"
"""Of keys that have no limits of their own."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one key may ask for in a minute. 0: any number."""

    name: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens that a request may still use."""

    window: str
    """The window that they were counted in."""
    tokens: int
    """Of this request; with its siblings' they add up to what was counted."""
    prompt_tokens: int
    """That it uses in any case; a prompt is counted with the first of several choices."""
    of_sibling: int = 0
    """Tokens of each further choice."""

    def for_sibling(self) -> "Reservation":
        """Of a further choice, which may come to stand in for the first one."""
        return Reservation(self.window, self.of_sibling, 0, self.of_sibling)


NOTHING = Reservation("", 0, 0)


class RateLimits:
    """All budgets, and what is left of them."""

    def __init__(
        self, config: RateLimitsConfig, keys_are_checked: bool, on_limited: Callable[[str, str], None]
    ) -> None:
        """`keys_are_checked`: without that, whoever makes up keys would have a budget for each; so those that have no
        limits of their own share one. `on_limited` hears which limit (`requests` or `tokens`) of whom was reached.
        """
        self._keys_are_checked = keys_are_checked
        self._on_limited = on_limited
        self._default = Budget(DEFAULT, config.requests_per_minute, config.tokens_per_minute)
        self._budgets: Mapping[str, Budget] = {
            tenant_of(key.get_secret_value()): Budget(
                name,
                self._default.requests if own.requests_per_minute is None else own.requests_per_minute,
                self._default.tokens if own.tokens_per_minute is None else own.tokens_per_minute,
            )
            for name, own in config.keys.items()
            for key in own.api_keys
        }
        self._storage: MemoryStorage | None = None
        if any(budget.requests or budget.tokens for budget in (self._default, *self._budgets.values())):
            self._storage = MemoryStorage()
            self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    def take(self, tenant: str, prompt_tokens: int, max_tokens: int, choices: int = 1) -> Reservation | Cause:
        """Counts a request with all its choices, each of at most `max_tokens`, and returns the share of the first one.

        A cause if its key has asked for too much already; then nothing is counted.
        """
        if self._storage is None:
            return NOTHING
        budget = self._budgets.get(tenant, self._default)
        whose = tenant if budget.name != DEFAULT or self._keys_are_checked else ""
        requests, tokens = _item("requests", budget.requests), _item("tokens", budget.tokens)
        # One that is larger than the budget is taken when nothing else is counted.
        cost = min(prompt_tokens + choices * max_tokens, budget.tokens)
        asked = [(item, amount) for item, amount in ((requests, 1), (tokens, cost)) if item is not None]
        over = [
            (self._wait_s(item, whose, amount), item) for item, amount in asked if not self._fits(item, whose, amount)
        ]
        if over:
            return self._limited(budget.name, *max(over, key=lambda each: each[0]))
        for item, amount in asked:
            self._limiter.hit(item, whose, cost=amount)
        if tokens is None:
            return NOTHING
        # `max_tokens`, unless the whole is more than the budget. No share is negative: counters do not go below 0, so
        # what siblings give back before that would be added would be lost.
        each = max(0, cost - prompt_tokens) // choices
        window = _windows(self._storage, tokens, whose)[1]
        return Reservation(window, cost - (choices - 1) * each, prompt_tokens, each)

    def settle(self, reserved: Reservation, answer_tokens: int) -> None:
        """A request has ended. What it did not use is free again; if it used more, that counts as well."""
        if self._storage is None or not reserved.window or not self._storage.get(reserved.window):
            return  # what was counted so long ago does not matter any more
        unused = reserved.tokens - reserved.prompt_tokens - answer_tokens
        if unused > 0:
            self._storage.decr(reserved.window, unused)
        elif unused < 0:
            self._storage.incr(reserved.window, 2 * WINDOW_S, -unused)

    def _fits(self, item: RateLimitItemPerMinute, whose: str, amount: int) -> bool:
        return self._limiter.test(item, whose, cost=amount)

    def _limited(self, name: str, wait_s: float, item: RateLimitItemPerMinute) -> Cause:
        what = str(item.namespace)
        self._on_limited(name, what)
        limit = f"{item.amount} {what} per minute"
        message = f"This API key has reached its limit of {limit}; try again in {math.ceil(wait_s)} s"
        return Cause("rate_limited", message, wait_s)

    def _wait_s(self, item: RateLimitItemPerMinute, whose: str, cost: int) -> float:
        assert self._storage is not None
        previous, previous_s, current, current_s = self._storage.get_sliding_window(item.key_for(whose), WINDOW_S)
        return wait_s(item.amount - cost, previous, previous_s, current, max(0.0, current_s - WINDOW_S))


def wait_s(room: int, previous: int, previous_s: float, current: int, current_s: float) -> float:
    """Seconds until at most `room` counts.

    Args:
        room: what may be counted before the next one.
        previous: count of the window before this one, which weighs less and less during the next `previous_s`.
        current: count of this window, which ends in `current_s`.
    """
    if current <= room:
        # previous * seconds left / WINDOW_S + current falls to `room` within this window.
        return max(0.0, previous_s - (room + 1 - current) * WINDOW_S / previous) if previous else 0.0
    return current_s + max(0.0, WINDOW_S - (room + 1) * WINDOW_S / current)


def _item(what: str, amount: int) -> RateLimitItemPerMinute | None:
    return RateLimitItemPerMinute(amount, namespace=what) if amount else None


def _windows(storage: MemoryStorage, item: RateLimitItemPerMinute, whose: str) -> tuple[str, str]:
    """Names of the counters of the last minute and this one."""
    return storage.sliding_window_keys(item.key_for(whose), WINDOW_S, time.time())
