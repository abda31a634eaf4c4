"""Which link a pair of ranks uses, and why. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkChoice:
    link: str
    """Empty when the two have no usable link in common."""
    why: str
    """For the log, `twinpool status` and refusals."""


def choose_link(
    importer_links: Sequence[str], exporter_links: Sequence[str], importer_host_id: str, exporter_host_id: str
) -> LinkChoice:
    """The importer's best link that the exporter has too; `host` only between processes of one machine."""
    same_host = importer_host_id == exporter_host_id
    passed_over = []
    for link in importer_links:
        if link not in exporter_links:
            passed_over.append(f"{link} is not enabled at the exporter")
        elif link == "host" and not same_host:
            passed_over.append("host needs both ranks on one machine and in one pid namespace")
        else:
            reason = "both ranks are on one machine" if link == "host" else "the best link that both ranks can use"
            return LinkChoice(link, "; ".join([reason, *passed_over]))
    reasons = "; ".join(passed_over) or "the importer has none left"
    return LinkChoice("", f"no link in common: {reasons}. Enable `zmq` on both sides; it works anywhere.")
