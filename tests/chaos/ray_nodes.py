"""Two Ray nodes on this machine, until standard input ends: `python ray_nodes.py DIRECTORY`; prints their address.

Ray's own cluster for tests. A process of its own, so that it can be found by its mark and ended whatever becomes of the
tests.
"""

import signal
import sys

from ray.cluster_utils import Cluster

_SMALL = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**_SMALL, "resources": {"for_prefill": 1, "for_rank": 1}, "temp_dir": sys.argv[1]},
    )
    try:
        cluster.add_node(**_SMALL, resources={"for_decode": 1, "for_rank": 1})
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
