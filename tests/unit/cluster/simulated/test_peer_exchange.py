"""Letters between processes of simulated workers, on real sockets."""

import asyncio
from pathlib import Path

import zmq.asyncio

from cluster.simulated.transfers.messages import Failed, Held, PeerMessage, Wanted
from cluster.simulated.transfers.peer_exchange import PeerExchange


async def test_an_address_that_is_none_costs_a_letter_and_nothing_else(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    peers = PeerExchange(context, f"ipc://{tmp_path}/peers")
    came: asyncio.Queue[PeerMessage] = asyncio.Queue()
    peers.join("importer", came.put_nowait)
    delivering = asyncio.create_task(peers.run())
    try:
        # Nobody has this life, so its sender would be answered.
        peers.send([(peers.address, Wanted("gone", "t", 1, 0, "nowhere", "importer"))])
        peers.send([("nowhere", Failed("importer", "t", "aborted"))])
        held = Held("importer", "t", 1, True, 5)
        peers.send([(peers.address, held)])
        assert await asyncio.wait_for(came.get(), 10) == held
        assert peers.bad_frames == 2
        assert not delivering.done()
    finally:
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        peers.close()
        context.destroy(linger=0)
