"""How many requests wait, whose they are, and who must leave when there are too many."""

from proxy.scheduling.waiting.fair_queue import Entry

Rank = tuple[int, int]


class Backlog:
    """Counts every waiting request of which its client has nothing yet."""

    def __init__(self) -> None:
        self.count = 0
        self._tenants: dict[str, dict[Rank, dict[str, None]]] = {}
        self._counts: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        """A request waits."""
        if entry.shape.promised:
            return
        tenant = entry.shape.standing.tenant
        self._tenants.setdefault(tenant, {}).setdefault(entry.rank, {})[entry.request_id] = None
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self.count += 1

    def remove(self, entry: Entry) -> None:
        """It does not wait any more."""
        if entry.shape.promised:
            return
        tenant, rank = entry.shape.standing.tenant, entry.rank
        ranks = self._tenants[tenant]
        del ranks[rank][entry.request_id]
        if not ranks[rank]:
            del ranks[rank]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._tenants[tenant], self._counts[tenant]
        self.count -= 1

    def surplus(self, newcomer: Entry) -> str:
        """The request that leaves a queue that is too long: of the tenant with most, the last of the lowest rank."""
        own = newcomer.shape.standing.tenant
        tenant = max(self._counts, key=lambda name: (self._counts[name], name == own))
        ranks = self._tenants[tenant]
        return next(reversed(ranks[max(ranks)]))
