"""Requests that wait for the same thing, in the order in which they go.

By rank first (continuations, priorities, the demoted), then fair between tenants and by deadline (`fair_queue`). So
that nobody starves, those whose deadline has passed get a sixteenth of all work, the longest overdue first.
"""

from bisect import insort
from heapq import heappop, heappush
from math import floor

from proxy.scheduling.waiting.fair_queue import Entry, FairQueue

OVERDUE_SHARE = 1 / 16
BUCKET_S = 0.25
"""Deadlines are told apart this finely when waiting work is added up."""

Rank = tuple[int, int]


class Lane:
    """One queue. Times in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._ranks: list[Rank] = []
        self._queues: dict[Rank, FairQueue] = {}
        self._due: dict[Rank, dict[int, float]] = {}  # work by bucket of its deadline
        self._by_deadline: list[tuple[float, int, Entry]] = []
        self._overdue_credit_s = 0.0
        self._pace = Pace()

    def push(self, entry: Entry) -> None:
        """Takes a request in."""
        rank = entry.rank
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = FairQueue()
            self._due[rank] = {}
            insort(self._ranks, rank)
        queue.push(entry)
        due, bucket = self._due[rank], floor(entry.deadline_s / BUCKET_S)
        due[bucket] = due.get(bucket, 0.0) + entry.work_s
        heappush(self._by_deadline, (*entry.key, entry))
        self.count += 1

    def head(self, now_s: float) -> Entry | None:
        """Who goes next."""
        overdue = self._most_overdue(now_s)
        if overdue is not None and self.favours(overdue):
            return overdue
        for rank in self._ranks:
            head = self._queues[rank].head()
            if head is not None:
                return head
        return None

    def favours(self, head: Entry) -> bool:
        """Whether so much has been done for others that it is the turn of this one, the longest overdue."""
        return self._overdue_credit_s >= head.work_s > 0.0 and head is self._by_deadline[0][2]

    def served(self, entry: Entry, now_s: float) -> None:
        """A request of this queue or of another one is going to be worked on; it still stands where it stood."""
        overdue = self._most_overdue(now_s)
        if overdue is None:
            self._overdue_credit_s = 0.0
        elif overdue is entry:
            self._overdue_credit_s = max(0.0, self._overdue_credit_s - entry.work_s)
        else:
            self._overdue_credit_s += entry.work_s * OVERDUE_SHARE

    def remove(self, entry: Entry, now_s: float, *, served: bool) -> None:
        """Somebody leaves; `served`: to be worked on."""
        rank = entry.rank
        queue = self._queues[rank]
        queue.remove(entry, served=served)
        due, bucket = self._due[rank], floor(entry.deadline_s / BUCKET_S)
        due[bucket] -= entry.work_s
        if due[bucket] < 1e-9:
            del due[bucket]
        if queue.count == 0:
            del self._queues[rank], self._due[rank]
            self._ranks.remove(rank)
        self.count -= 1
        self._pace.note(now_s, entry.work_s if served else 0.0, idle=self.count == 0)

    def wait_s(self, entry: Entry, workers: int) -> float:
        """How long a request that is in the queue will wait there, at the pace of late and at best at that of workers.

        An estimate: it assumes that nobody more urgent comes.
        """
        rank = entry.rank
        ahead_s = sum(self._queues[r].work_s for r in self._ranks if r < rank)
        queue = self._queues[rank]
        bucket = floor(entry.deadline_s / BUCKET_S)
        earlier_s = sum(work_s for due, work_s in self._due[rank].items() if due <= bucket)
        own_rank_s = min(earlier_s, queue.ahead_of_s(entry.shape.standing.tenant, entry.work_s)) - entry.work_s
        return (ahead_s + max(0.0, own_rank_s)) * max(1.0 / max(1, workers), self._pace.seconds_per_work)

    @property
    def work_s(self) -> float:
        """Of all that wait, on one worker."""
        return sum(queue.work_s for queue in self._queues.values())

    def _most_overdue(self, now_s: float) -> Entry | None:
        while self._by_deadline and not self._by_deadline[0][2].waiting:
            heappop(self._by_deadline)
        if self._by_deadline and self._by_deadline[0][0] < now_s:
            return self._by_deadline[0][2]
        return None


class Pace:
    """Seconds that pass per second of work that leaves a queue, while there is a queue.

    With three workers it is a third if they are what is waited for, and more if it is something else.
    """

    FADE = 0.9
    ENOUGH = 4

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._seconds = 0.0
        self._work_s = 0.0
        self._samples = 0

    def note(self, now_s: float, work_s: float, *, idle: bool) -> None:
        """Work left the queue (0: nobody took it)."""
        if self._last_s is not None and work_s > 0.0:
            self._seconds = self._seconds * self.FADE + now_s - self._last_s
            self._work_s = self._work_s * self.FADE + work_s
            self._samples += 1
        if idle:
            self._last_s, self._seconds, self._work_s, self._samples = None, 0.0, 0.0, 0
        elif work_s > 0.0 or self._last_s is None:
            self._last_s = now_s

    @property
    def seconds_per_work(self) -> float:
        """0 while too little is known."""
        return self._seconds / self._work_s if self._samples >= self.ENOUGH and self._work_s > 0.0 else 0.0
