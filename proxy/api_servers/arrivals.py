"""Choices of `n > 1` requests that are on their way from an API server to the dispatcher.

They come one by one. When one is refused before the last has come, the client has its answer, and the rest are for
nobody.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Group:
    left: int
    """Still on their way."""
    ids: list[str] = field(default_factory=list)
    failed: bool = False


class Arrivals:
    """Of one life of one process, which takes what is left along."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def admits(self, request_id: str, group: str, choices: int) -> bool:
        """A request has come; False if a sibling has failed already."""
        if not group or choices <= 1:
            return True
        known = self._groups.setdefault(group, _Group(choices))
        known.left -= 1
        if known.left > 0:
            known.ids.append(request_id)
            self._group_of[request_id] = known
        else:
            del self._groups[group]
            for each in known.ids:
                del self._group_of[each]
        return not known.failed

    def failed(self, request_id: str) -> None:
        """A request was answered with an error, and its siblings with it."""
        if (group := self._group_of.get(request_id)) is not None:
            group.failed = True
