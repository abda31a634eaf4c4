"""An exporter on a GPU, in a process of its own: `exporter_process.py DIRECTORY DEVICE LINK APART TRANSFER...`.

Prints its address and epoch when every transfer named is ready to be fetched, with the blocks 1 to NUM_BLOCKS - 1.
"""

import importlib
import sys

from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import probe
from kvtransfer.rank_endpoint import RankEndpoint
from tests.gpu.gpu_cache import BLOCK_SIZE, FACTS, NUM_BLOCKS, PROMPT_HASH, fill, make_cache

if __name__ == "__main__":
    directory, device, link, is_apart, *transfers = sys.argv[1:]
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(int(device)).use()
    cache = make_cache(cupy, int(device), is_apart == "apart")
    fill(cupy, cache)
    settings = EndpointSettings(rank=0, bind=f"ipc://{directory}/exporter", links=(link,))
    endpoint = RankEndpoint(settings, probe(cache, NUM_BLOCKS, FACTS))
    block_ids = list(range(1, NUM_BLOCKS))
    for transfer in transfers:
        endpoint.open_export(transfer, PROMPT_HASH, len(block_ids) * BLOCK_SIZE)
        endpoint.finish_export(transfer, block_ids, len(block_ids) * BLOCK_SIZE, 7)
    sys.stdout.write(f"{endpoint.address} {endpoint.epoch}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test is over
    endpoint.close()
