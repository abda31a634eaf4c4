"""What simulated workers say to each other about transfers; the blocks themselves are only counted.

Each process listens on one address for all of its workers. A worker is named by its epoch, so a message for an earlier
life reaches nobody. Importers repeat `Wanted` every heartbeat until they have everything; `Held` answers it.
"""

import msgspec

from kvtransfer.wire import Count, Seconds, Size


class Wanted(msgspec.Struct, tag="wanted", frozen=True):
    """Importer to exporter: holds the blocks, and asks how far they are."""

    to: str
    transfer_id: str
    num_tokens: Count
    prompt_state: Size
    """Checksum of the prompt; both must have the same."""
    reply_address: str
    reply_to: str


class Held(msgspec.Struct, tag="held", frozen=True):
    """Exporter to importer, at once when something changed and as an answer to `Wanted`."""

    to: str
    transfer_id: str
    num_tokens: Count
    """Computed so far."""
    is_done: bool
    first_token: Count


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Exporter to importer: there is nothing to fetch. `kind` is one of the transfer's failure kinds."""

    to: str
    transfer_id: str
    kind: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """Importer to exporter: the blocks are here, or not wanted any more."""

    to: str
    transfer_id: str
    bytes_moved: Size
    copy_s: Seconds


PeerMessage = Wanted | Held | Failed | Release
