"""The end of a cluster that served: this file comes last, so the cluster it ends has done all its work."""

import time

import pytest

from lab.server_process import Server, wait_for_no_process

pytestmark = pytest.mark.timeout(300)  # alone, this test waits for the start of a cluster

LEAVES_WITHIN_S = 20.0


def test_ctrl_c_while_serving_leaves_no_process(zmq_cluster: Server) -> None:
    """And a second, impatient one changes nothing about that."""
    zmq_cluster.interrupt()
    time.sleep(0.3)
    if zmq_cluster.process.poll() is None:
        zmq_cluster.interrupt()
    code = zmq_cluster.process.wait(LEAVES_WITHIN_S)

    assert wait_for_no_process(zmq_cluster.mark, 2.0) == {}
    assert code in (0, 130, -2), zmq_cluster.log()[-2000:]
