"""Waiting requests of equal rank: earliest deadline first, as long as no tenant takes more than its share.

Each tenant has a virtual time: the work that was started for it. Who is ahead of the tenant that got least by more than
`SLACK_S` stands back until the others have caught up; among the rest the earliest deadline goes first. A tenant that
comes anew starts at the virtual time of the one that got least, so nobody can save up.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from proxy.scheduling.view import RequestShape

SLACK_S = 1.0
"""Seconds of work by which one tenant may get ahead of another in the order of deadlines."""

SWEPT_FROM = 64
"""Tenants that are remembered before it is asked whether some can be forgotten."""


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request."""

    request_id: str
    shape: RequestShape
    seq: int
    """Order of arrival in the queue."""
    arrived_s: float
    """At the proxy."""
    since_s: float
    """In this queue; later than `arrived_s` if it was placed before."""
    deadline_s: float
    """For its first token."""
    work_s: float
    """Its prefill on an average worker."""
    share_s: float
    """What its tenant is charged: `work_s` and as much per expected token of output."""
    demoted: bool = False
    waiting: bool = True
    """False once it has left the queue; heaps drop it when they come to it."""

    def __lt__(self, other: "Entry") -> bool:
        return self.seq < other.seq

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first: continuations, then by priority, and behind all who cannot be in time anyway."""
        if self.shape.continues:
            return (0, 0)
        return (2 if self.demoted else 1, self.shape.standing.priority)

    @property
    def key(self) -> tuple[float, int]:
        """Order within a rank."""
        return (self.deadline_s, self.seq)


@dataclass(slots=True, eq=False)
class _Share:
    """One tenant's part."""

    tenant: str
    number: int
    """Breaks ties of the heaps."""
    virtual_s: float
    entries: list[tuple[float, int, Entry]] = field(default_factory=list)
    count: int = 0
    """Entries that still wait."""
    work_s: float = 0.0
    """Theirs."""
    held_back: bool = False
    listed: int = -1
    """`seq` of the head under which it stands in the heap of heads."""

    def __lt__(self, other: "_Share") -> bool:
        return self.number < other.number

    def head(self) -> Entry | None:
        while self.entries and not self.entries[0][2].waiting:
            heappop(self.entries)
        return self.entries[0][2] if self.entries else None


class FairQueue:
    """Every operation takes logarithmic time; entries that left are dropped when they come up."""

    def __init__(self) -> None:
        self.count = 0
        self.work_s = 0.0
        self._shares: dict[str, _Share] = {}
        self._num_active = 0
        self._heads: list[tuple[float, int, _Share]] = []
        self._least: list[tuple[float, int, _Share]] = []
        self._back: list[tuple[float, int, _Share]] = []
        self._numbers = 0
        self._sweep_at = SWEPT_FROM

    def push(self, entry: Entry) -> None:
        """Takes a request in."""
        tenant = entry.shape.standing.tenant
        share = self._shares.get(tenant)
        if share is None:
            self._sweep()
            self._numbers += 1
            share = self._shares[tenant] = _Share(tenant, self._numbers, self._floor())
        if share.count == 0:
            self._num_active += 1
            share.virtual_s = max(share.virtual_s, self._floor())
            heappush(self._least, (share.virtual_s, share.number, share))
        share.count += 1
        self._hold_back(share)
        share.work_s += entry.work_s
        self.count += 1
        self.work_s += entry.work_s
        heappush(share.entries, (*entry.key, entry))
        if not share.held_back:
            self._list(share)

    def head(self) -> Entry | None:
        """Who goes next, if anyone may."""
        limit_s = self._floor() + SLACK_S
        while self._back and self._back[0][0] <= limit_s:
            share = heappop(self._back)[2]
            share.held_back = False
            self._list(share)
        while self._heads:
            _, seq, share = self._heads[0]
            head = share.head()
            if head is not None and head.seq == seq and not share.held_back:
                return head
            heappop(self._heads)
            if share.listed == seq:
                share.listed = -1
                if not share.held_back:
                    self._list(share)
        return None

    def remove(self, entry: Entry, *, served: bool) -> None:
        """Somebody leaves the queue; `served`: to be worked on, which its tenant is charged for."""
        entry.waiting = False
        share = self._shares[entry.shape.standing.tenant]
        share.count -= 1
        share.work_s = share.work_s - entry.work_s if share.count else 0.0
        self.count -= 1
        self.work_s = self.work_s - entry.work_s if self.count else 0.0
        if share.count == 0:
            self._num_active -= 1
        if served:
            share.virtual_s += entry.share_s
        if self.count == 0:
            # Nobody competes: nobody owes anything.
            self._shares.clear()
            self._heads, self._least, self._back = [], [], []
            return
        if not served or share.count == 0:
            return
        heappush(self._least, (share.virtual_s, share.number, share))
        self._hold_back(share)

    def ahead_of_s(self, tenant: str, work_s: float) -> float:
        """Work that goes before a new request of a tenant at most, by fairness alone."""
        share = self._shares.get(tenant)
        own_s = share.work_s if share is not None else 0.0
        others = self._num_active - (1 if share is not None and share.count else 0)
        return own_s + min(self.work_s - own_s, others * (own_s + work_s + SLACK_S))

    def _floor(self) -> float:
        """Virtual time of the waiting tenant that got least."""
        while self._least:
            virtual_s, _, share = self._least[0]
            if share.count and virtual_s == share.virtual_s:
                return virtual_s
            heappop(self._least)
        return 0.0

    def _sweep(self) -> None:
        """Forgets tenants that wait for nothing and owe nothing. Where keys are not checked, anybody can be many."""
        if len(self._shares) < self._sweep_at:
            return
        floor_s = self._floor()
        self._shares = {name: s for name, s in self._shares.items() if s.count or s.virtual_s > floor_s}
        self._sweep_at = max(SWEPT_FROM, 2 * len(self._shares))

    def _hold_back(self, share: _Share) -> None:
        if not share.held_back and share.virtual_s > self._floor() + SLACK_S:
            share.held_back = True
            heappush(self._back, (share.virtual_s, share.number, share))

    def _list(self, share: _Share) -> None:
        head = share.head()
        if head is not None and head.seq != share.listed:
            share.listed = head.seq
            heappush(self._heads, (*head.key, share))
