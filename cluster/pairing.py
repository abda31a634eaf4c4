"""Which prefill and decode workers may exchange KV blocks: the rule of the transfer, for who knows them by messages."""

from kvtransfer.resharding.pairing import Difference, differing_fields

__all__ = ["Difference", "differing_fields"]
