from typing import Any

import pytest

from kvtransfer.endpoint.settings import EndpointSettings


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"links": ()}, "name one or more of"),
        ({"links": ("zmq", "pigeon")}, "pigeon"),
        ({"bind": "ipc:///" + "x" * 100}, "at most 100 characters"),
        ({"bind": "tcp://10.0.0.1:0"}, "key_file is empty"),
        ({"bind": "tcp://*:0"}, "key_file is empty"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": (64 << 20) + 1}, "choose 1 to 67108864"),
        ({"fetch_window": 0}, "fetch_window is 0"),
        ({"fetch_window": 65}, "choose 1 to 64"),
        ({"peer_lost_after_s": 0}, "peer_lost_after_s is 0"),
        ({"verify": "some"}, "verify is 'some'"),
        ({"beat_s": 20, "lease_renew_s": 20}, "a lease would end between two beats"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        EndpointSettings(**{"rank": 0, "bind": "tcp://127.0.0.1:0", **changes})
