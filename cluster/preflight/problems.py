"""A fault in the configuration, told so that it can be repaired."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault."""

    field: str
    """Dotted path in the configuration; empty for the file as a whole."""
    what: str
    """What was found and what was expected, a sentence without a full stop."""
    remedy: str
    """What to do, an imperative without a full stop."""

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.what}. {self.remedy}."


class ConfigError(Exception):
    """The cluster cannot be started like this."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that `name` was probably meant to be, or an empty string."""
    matches = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""
