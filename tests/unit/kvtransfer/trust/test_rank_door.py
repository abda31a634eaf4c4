"""Ranks that listen on tcp: they exchange blocks with holders of the key and with nobody else."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtransfer.messages import Hello
from kvtransfer.trust.key import KeyFileError, new_key, write_key
from tests.unit.kvtransfer.rank_pair import Cluster, eventually
from tests.unit.kvtransfer.trust.strangers import caller, zmq_context

TCP = "tcp://127.0.0.1:0"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("link", ["host", "zmq"])
def test_ranks_with_one_key_exchange_blocks(cluster: Cluster, tmp_path: Path, link: str) -> None:
    key_file = str(write_key(tmp_path / "key", new_key()))
    exporter, importer = (cluster.rank(links=(link,), bind=TCP, key_file=key_file) for _ in range(2))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [1, 2, 3])


def test_an_importer_with_another_key_gets_no_block_and_is_counted(cluster: Cluster, tmp_path: Path) -> None:
    own, other = (str(write_key(tmp_path / name, new_key())) for name in ("own", "other"))
    exporter = cluster.rank(links=("zmq",), bind=TCP, key_file=own)
    importer = cluster.rank(links=("zmq",), bind=TCP, key_file=other)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12, wants_first_token=False)
    exporter.export("t", [1, 2, 3], 12)
    closed = importer.closed_import()
    assert closed.outcome == "recompute"
    assert sorted(closed.bad_block_ids) == [7, 8, 9]
    eventually(lambda: sum(exporter.endpoint.stats().refused.values()) > 0)
    assert not importer.holds([7, 8, 9], exporter, [1, 2, 3])


def test_a_stranger_at_a_ranks_port_is_not_answered(cluster: Cluster, tmp_path: Path) -> None:
    exporter = cluster.rank(bind=TCP, key_file=str(write_key(tmp_path / "key", new_key())))
    hello = msgspec.msgpack.encode(Hello.__struct_fields__)
    with zmq_context() as context, caller(context, exporter.endpoint.address, None, hello) as stranger:
        eventually(lambda: sum(exporter.endpoint.stats().refused.values()) == 1)
        assert not stranger.poll(0)
    assert exporter.endpoint.stats().bad_frames == 0


def test_a_rank_does_not_start_with_a_key_that_others_may_read(cluster: Cluster, tmp_path: Path) -> None:
    path = write_key(tmp_path / "key", new_key())
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 0600"):
        cluster.rank(bind=TCP, key_file=str(path))
