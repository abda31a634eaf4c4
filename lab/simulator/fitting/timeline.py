"""What servers carried at any time of a measured run, from its records. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lab.load.client import Record

Floats = npt.NDArray[np.float64]


class Timeline:
    """The requests of one server, or of several that nobody can tell apart. Times in seconds from the run's start."""

    def __init__(self, records: Sequence[Record]) -> None:
        begun = [record for record in records if record.ttft_s is not None]
        first = np.array([r.sent_s + (r.ttft_s or 0.0) for r in begun])
        last = first + np.array([sum(r.gaps_s) for r in begun])
        prompts = np.array([r.prompt_tokens for r in begun], dtype=float)
        tokens = np.array([1 + len(r.gaps_s) for r in begun], dtype=float)
        by_first, by_last = np.argsort(first), np.argsort(last)
        self._first, self._last = first[by_first], last[by_last]
        self._prompts_begun = _sums(prompts[by_first])
        self._tokens_ended = _sums((prompts + tokens)[by_last])
        self._token_times = np.sort(np.concatenate([[], *(token_times(record) for record in begun)]))
        ends = [r.sent_s + (r.end_to_end_s if r.ttft_s is None else r.ttft_s) for r in records]
        self._sent = np.sort(np.array([r.sent_s for r in records]))
        self._prefilled = np.sort(np.array(ends))

    def decoding(self, at_s: Floats) -> Floats:
        """Streams that have begun and not ended."""
        return (np.searchsorted(self._first, at_s) - np.searchsorted(self._last, at_s)).astype(float)

    def kv_tokens(self, at_s: Floats) -> Floats:
        """Of these streams, all together: prompts, and what was generated so far."""
        begun = self._prompts_begun[np.searchsorted(self._first, at_s)]
        ended = self._tokens_ended[np.searchsorted(self._last, at_s)]
        return begun + np.searchsorted(self._token_times, at_s) - ended

    def prefills(self, from_s: Floats, to_s: Floats) -> Floats:
        """Requests that waited for their first token at any time between."""
        return (np.searchsorted(self._sent, to_s) - np.searchsorted(self._prefilled, from_s)).astype(float)


def token_times(record: Record) -> Floats:
    """When each token of a reply came."""
    return record.sent_s + (record.ttft_s or 0.0) + np.cumsum([0.0, *record.gaps_s])


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
