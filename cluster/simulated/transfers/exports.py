"""The prompts that a simulated worker hands over: how far they are and how long their blocks are held. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.simulated.engine.events import ExportAborted, ExportFinished, ExportProgressed, ExportStarted
from cluster.simulated.transfers.messages import Failed, Held, PeerMessage, Release, Wanted

Letter = tuple[str, PeerMessage]
"""An address and what goes there."""


@dataclass(slots=True)
class _Export:
    num_prompt_tokens: int
    prompt_state: int
    lease_until_s: float
    num_tokens: int = 0
    is_done: bool = False
    first_token: int = 0
    importer: tuple[str, str] | None = None
    """Address and epoch."""


@dataclass(slots=True)
class Exports:
    """All exports of one worker. Methods return what its importers are told."""

    lease_first_s: float
    lease_renew_s: float
    ended: list[str] = field(default_factory=list)
    """Transfers whose blocks are to be freed; taken by the caller."""
    bytes_out: int = 0
    copy_out_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    _exports: dict[str, _Export] = field(default_factory=dict)

    def engine_says(
        self, event: ExportStarted | ExportProgressed | ExportFinished | ExportAborted, now_s: float
    ) -> list[Letter]:
        """What the engine did."""
        transfer_id = event.transfer_id
        if isinstance(event, ExportStarted):
            self._exports[transfer_id] = _Export(event.num_tokens, event.prompt_state, now_s + self.lease_first_s)
            return []
        export = self._exports.get(transfer_id)
        match event, export:
            case ExportFinished(), None:
                # Dropped while it was computed: nobody wants the blocks.
                self.ended.append(transfer_id)
            case ExportFinished(first_token=token), _Export():
                export.is_done, export.first_token = True, token
                export.lease_until_s = now_s + self.lease_first_s
                return self._tell(transfer_id, export)
            case ExportProgressed(num_tokens=num_tokens), _Export() if num_tokens != export.num_tokens:
                export.num_tokens = num_tokens
                return self._tell(transfer_id, export)
            case ExportAborted(), _Export():
                return self._end(transfer_id, "aborted")
        return []

    def on_wanted(self, message: Wanted, now_s: float) -> list[Letter]:
        """An importer attaches, or renews its lease."""
        export = self._exports.get(message.transfer_id)
        if export is None:
            return [(message.reply_address, Failed(message.reply_to, message.transfer_id, "unknown_transfer"))]
        if (message.num_tokens, message.prompt_state) != (export.num_prompt_tokens, export.prompt_state):
            return [(message.reply_address, Failed(message.reply_to, message.transfer_id, "mismatch"))]
        export.importer = (message.reply_address, message.reply_to)
        export.lease_until_s = max(export.lease_until_s, now_s + self.lease_renew_s)
        return self._tell(message.transfer_id, export)

    def on_release(self, message: Release) -> None:
        """An importer has what it wanted."""
        if self._exports.pop(message.transfer_id, None) is not None:
            self.ended.append(message.transfer_id)
            self.bytes_out += message.bytes_moved
            self.copy_out_s += message.copy_s

    def hold(self, transfer_id: str, now_s: float) -> None:
        """The proxy still means to hand it over."""
        export = self._exports.get(transfer_id)
        if export is not None:
            export.lease_until_s = max(export.lease_until_s, now_s + self.lease_renew_s)

    def drop(self, transfer_id: str) -> list[Letter]:
        """Nobody will fetch it."""
        return self._end(transfer_id, "aborted")

    def drop_all(self) -> list[Letter]:
        """Whoever wanted these is gone."""
        return [letter for transfer_id in list(self._exports) for letter in self.drop(transfer_id)]

    def expire(self, now_s: float) -> list[Letter]:
        """Ends leases that ran out. A prompt that is still being computed has no lease to lose."""
        late = [t for t, export in self._exports.items() if export.is_done and export.lease_until_s < now_s]
        return [letter for transfer_id in late for letter in self._end(transfer_id, "lease_expired")]

    @property
    def leases(self) -> dict[str, int]:
        """Open exports by state."""
        return dict(Counter("held" if export.is_done else "computing" for export in self._exports.values()))

    def _tell(self, transfer_id: str, export: _Export) -> list[Letter]:
        if export.importer is None:
            return []
        address, epoch = export.importer
        return [(address, Held(epoch, transfer_id, export.num_tokens, export.is_done, export.first_token))]

    def _end(self, transfer_id: str, kind: str) -> list[Letter]:
        export = self._exports.pop(transfer_id, None)
        if export is None:
            return []
        self.ended.append(transfer_id)
        if kind != "aborted":
            self.failures[kind] += 1
        if export.importer is None:
            return []
        address, epoch = export.importer
        return [(address, Failed(epoch, transfer_id, kind))]
