"""What a running cluster tells about itself, for tests that ask how a reply came about."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec

from cluster.status import ClusterStatus, WorkerStatus
from tests.engine.servers import PLAIN_HTTP

_BY_P = re.compile(r'placement="(remote|prefillonly)"')
_SAMPLE = re.compile(r"^(twinpool_\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)

_HTTP = httpx.Client(
    headers={"Authorization": "Bearer sesame"},  # of the cluster that wants a key; the others do not look at it
    timeout=10,
    verify=PLAIN_HTTP,
    limits=httpx.Limits(max_keepalive_connections=0),  # the servers come and go
)


def counters(url: str) -> dict[str, float]:
    """Every `twinpool_` sample of `/metrics`, summed over its labels, and once more with them: `name{label="x"}`."""
    text = _HTTP.get(f"{url}/metrics").raise_for_status().text
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
        if labels:
            found[name + labels] = float(value)
    return found


def status(url: str) -> ClusterStatus:
    answer = _HTTP.get(f"{url}/twinpool/status").raise_for_status()
    return msgspec.json.decode(answer.content, type=ClusterStatus)


def worker(url: str, worker_id: str) -> WorkerStatus:
    found = [item for item in status(url).workers if item.worker_id == worker_id]
    if not found:
        raise LookupError(f"no worker {worker_id} in {[item.worker_id for item in status(url).workers]}")
    return found[0]


def wait_until(what: str, holds: Callable[[], bool], deadline_s: float, every_s: float = 0.1) -> None:
    """Polls until `holds()`; raises with `what` at the deadline."""
    until = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"after {deadline_s} s it still does not hold that {what}")
        time.sleep(every_s)


@dataclass(frozen=True)
class Movement:
    """What happened between two looks at a cluster's counters."""

    bytes_: float
    """Moved over the expected link."""
    bytes_over_any_link: float
    remote_tokens: float
    local_tokens: float
    recomputed: float
    """Hand-overs whose blocks the decode worker computed itself."""
    prefilled_by_p: bool
    """Some request was placed so that a prefill worker computed its prompt."""


class Watch:
    """How much prefill was remote, and how many bytes a link moved, since this was made."""

    def __init__(self, url: str, link: str) -> None:
        self._url = url
        self._link = f'twinpool_handover_bytes_total{{link="{link}"}}'
        self._before = counters(url)

    def so_far(self) -> Movement:
        return self._between(counters(self._url))

    def after_handovers(self, number: int = 1) -> Movement:
        """The decode worker's report of a hand-over may come a moment after the reply."""
        name = "twinpool_handovers_total"
        seen = self._before

        def reported() -> bool:
            nonlocal seen
            seen = counters(self._url)
            return seen.get(name, 0.0) - self._before.get(name, 0.0) >= number

        wait_until(f"{number} hand-overs were reported", reported, 5.0, every_s=0.02)
        return self._between(seen)

    def _between(self, seen: dict[str, float]) -> Movement:
        def since(name: str) -> float:
            return seen.get(name, 0.0) - self._before.get(name, 0.0)

        return Movement(
            bytes_=since(self._link),
            bytes_over_any_link=since("twinpool_handover_bytes_total"),
            remote_tokens=since("twinpool_remote_prefill_tokens_total"),
            local_tokens=since("twinpool_local_prefill_tokens_total"),
            recomputed=since("twinpool_handover_failures_total"),
            prefilled_by_p=any(
                since(name) > 0 for name in seen if name.startswith("twinpool_decisions_total{") and _BY_P.search(name)
            ),
        )
