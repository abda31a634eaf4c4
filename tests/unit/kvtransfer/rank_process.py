"""A rank in a process of its own, to be killed: `rank_process.py DIRECTORY LINK ROLE [ADDRESS EPOCH]`.

An exporter computes half of transfer `t` and then hangs, or, with role `finished`, ends it. An importer attaches to `t`
at the given exporter and hangs. Either prints its address and epoch first.
"""

import sys
import time

from kvtransfer.layout import probe
from kvtransfer.rank_endpoint import RankEndpoint
from tests.unit.kvtransfer.rank_pair import FACTS, NUM_BLOCKS, PROMPT_HASH, Cluster, eventually, make_cache

SEED = 77

if __name__ == "__main__":
    directory, link, role, *exporter = sys.argv[1:]
    settings = Cluster(directory).settings(f"child-{role}", links=(link,))  # type: ignore[arg-type]
    endpoint = RankEndpoint(settings, probe(make_cache(SEED), NUM_BLOCKS, FACTS))
    if role == "importer":
        endpoint.open_import("t", exporter[0], exporter[1], PROMPT_HASH, 12, False)
        eventually(lambda: endpoint.stats().peers)  # welcomed, and attached with that
    else:
        endpoint.open_export("t", PROMPT_HASH, 12)
        endpoint.announce("t", [1, 2], 8)
    if role == "finished":
        endpoint.finish_export("t", [1, 2, 3], 12, 7)
    sys.stdout.write(f"{endpoint.address} {endpoint.epoch}\n")
    sys.stdout.flush()
    time.sleep(60)
