"""What a running cluster tells about itself, for tests that ask how a reply came about."""

import re
import time
from collections.abc import Callable

import httpx
import msgspec

from cluster.status import ClusterStatus, WorkerStatus

_BY_P = re.compile(r'placement="(remote|prefillonly)"')
_SAMPLE = re.compile(r"^(twinpool_\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


_KEY = {"Authorization": "Bearer sesame"}
"""Of the cluster that wants one; the others do not look at it."""


def counters(url: str) -> dict[str, float]:
    """Every `twinpool_` sample of `/metrics`, summed over its labels, and once more with them: `name{label="x"}`."""
    text = httpx.get(f"{url}/metrics", headers=_KEY, timeout=10).raise_for_status().text
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
        if labels:
            found[name + labels] = float(value)
    return found


def status(url: str) -> ClusterStatus:
    answer = httpx.get(f"{url}/twinpool/status", headers=_KEY, timeout=10).raise_for_status()
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


class Moved:
    """How much prefill was remote, and how many bytes a link moved, since this was made."""

    def __init__(self, url: str, link: str) -> None:
        self._url = url
        self._link = f'twinpool_handover_bytes_total{{link="{link}"}}'
        self._before = counters(url)

    def _since(self, name: str) -> float:
        return counters(self._url).get(name, 0.0) - self._before.get(name, 0.0)

    def wait_for_handovers(self, number: int = 1) -> None:
        """The decode worker's report of a hand-over may come a moment after the reply."""
        name = "twinpool_handovers_total"
        wait_until(f"{number} hand-overs were reported", lambda: self._since(name) >= number, 5.0, every_s=0.02)

    @property
    def bytes_(self) -> float:
        """Over the expected link only."""
        return self._since(self._link)

    @property
    def bytes_over_any_link(self) -> float:
        return self._since("twinpool_handover_bytes_total")

    @property
    def remote_tokens(self) -> float:
        return self._since("twinpool_remote_prefill_tokens_total")

    @property
    def local_tokens(self) -> float:
        return self._since("twinpool_local_prefill_tokens_total")

    @property
    def prefilled_by_p(self) -> bool:
        """Some request was placed so that a prefill worker computed its prompt."""
        return any(
            count > self._before.get(name, 0.0)
            for name, count in counters(self._url).items()
            if name.startswith("twinpool_decisions_total{") and _BY_P.search(name)
        )

    @property
    def recomputed(self) -> float:
        return self._since("twinpool_handover_failures_total")
