"""Tells a model's cluster to sleep or to wake, over its API server, and waits until it has."""

import aiohttp
import msgspec

from cluster.models.models_file import ModelSpec
from cluster.orders import Refusal, SleepOrder, WakeOrder
from cluster.preflight.security_checks import API_KEY_VARIABLE, api_keys

_REQUESTS_WITHIN_S = 10.0
"""The front has none there; what may be left is a look at `/ready`."""
SLEEP_TIMEOUT_S = 90.0
_MARGIN_S = 5.0


class NotTurned(Exception):
    """It does not sleep, or is not awake; the text says why."""


async def put_to_sleep(session: aiohttp.ClientSession, spec: ModelSpec) -> None:
    """Returns when it sleeps. Raises `NotTurned`."""
    await _order(session, spec, "sleep", SleepOrder(_REQUESTS_WITHIN_S), SLEEP_TIMEOUT_S)


async def wake(session: aiohttp.ClientSession, spec: ModelSpec) -> None:
    """Returns when it is awake. Raises `NotTurned`."""
    within_s = spec.config.wake_timeout_s
    await _order(session, spec, "wake", WakeOrder(within_s), within_s + _MARGIN_S)


async def _order(
    session: aiohttp.ClientSession, spec: ModelSpec, what: str, order: msgspec.Struct, timeout_s: float
) -> None:
    key = next(iter(api_keys(spec.cluster)), spec.config.env.get(API_KEY_VARIABLE, ""))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(
            f"http://model/twinpool/{what}", data=msgspec.json.encode(order), headers=headers, timeout=timeout
        ) as response:
            body = await response.read()
    except TimeoutError as error:
        raise NotTurned(f"it did not answer the order to {what} within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last: it has ended, and its session is closed
        raise NotTurned(f"the order to {what} did not reach it: {error}") from error
    if response.status != 200:
        raise NotTurned(f"it could not {what}: {_reason(body) or f'HTTP status {response.status}'}")


def _reason(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=Refusal).error.message
    except msgspec.DecodeError:
        return ""
