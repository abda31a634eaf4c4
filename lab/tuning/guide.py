"""docs/tuning.md: the text of `template.md` with its tables filled in."""

import re
from functools import cache
from pathlib import Path

from lab.tuning import arithmetic, simulated

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NOT_YET = "Not measured yet: `twinpool lab run tuning --out RUN`, then `twinpool lab tune RUN`."
TEMPLATE = Path(__file__).with_name("template.md")
_PLACE = re.compile(r"\{\{([\w.]+)\}\}")


def measured_part(guide: str) -> str:
    """What stands between the marks; empty if there are none, or nothing was measured yet."""
    _, begin, rest = guide.partition(BEGIN)
    part, end, _ = rest.partition(END)
    found = part.strip() if begin and end else ""
    return "" if found == NOT_YET else found


def write_guide(measured: str = "") -> str:
    """All of it. The same measured part always gives the same text."""
    tables = {**_computed(), "measured": f"{BEGIN}\n\n{measured or NOT_YET}\n\n{END}"}
    return _PLACE.sub(lambda place: tables[place[1]], TEMPLATE.read_text(encoding="utf-8"))


@cache
def _computed() -> dict[str, str]:
    """By their names in the template. Simulating takes a second."""
    return {
        "arithmetic.memory_share": arithmetic.memory_share(),
        "arithmetic.sequences": arithmetic.sequences(),
        "arithmetic.chunks": arithmetic.chunks(),
        "arithmetic.ranks": arithmetic.ranks(),
        "arithmetic.kv_dtypes": arithmetic.kv_dtypes(),
        "arithmetic.cached_prefix": arithmetic.cached_prefix(),
        "simulated.memory_share": simulated.memory_share(),
        "simulated.chunks": simulated.chunks(),
        "simulated.cached_prefix": simulated.cached_prefix(),
    }
