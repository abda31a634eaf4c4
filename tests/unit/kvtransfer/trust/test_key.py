"""Key files: what is read, what is refused, and that no text shows a key."""

import stat
from pathlib import Path

import pytest
import zmq.auth

from kvtransfer.trust.key import ClusterKey, KeyFileError, is_pair, key_in_memory, new_key, read_key, write_key


def test_a_key_is_read_back_from_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    key = new_key()
    path = write_key(tmp_path / "cluster.key", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) == key


def test_a_key_file_is_replaced_whatever_its_mode_was(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("old")
    path.chmod(0o644)
    key = new_key()
    assert read_key(write_key(path, key)) == key


def test_a_key_is_read_back_from_memory() -> None:
    key = new_key()
    path = key_in_memory(key)
    assert read_key(path) == read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_certificate_of_pyzmq_is_a_key_file(tmp_path: Path) -> None:
    _, secret_file = zmq.auth.create_certificates(tmp_path, "cluster")
    Path(secret_file).chmod(0o600)
    key = read_key(Path(secret_file))
    assert is_pair(key.public, key.secret)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = write_key(tmp_path / "cluster.key", new_key())
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"mode 0640 .* chmod 0600"):
        read_key(path)


def test_what_is_no_pair_is_refused_without_showing_it(tmp_path: Path) -> None:
    one, other = new_key(), new_key()
    path = write_key(tmp_path / "cluster.key", ClusterKey(one.public, other.secret))
    with pytest.raises(KeyFileError, match="holds no pair") as refusal:
        read_key(path)
    assert other.secret not in str(refusal.value)
    path.write_text("public-key = x\nsecret-key = y\n")
    with pytest.raises(KeyFileError, match="holds no pair"):
        read_key(path)
    path.write_text("nothing")
    with pytest.raises(KeyFileError, match="No public key"):
        read_key(path)
    with pytest.raises(KeyFileError, match="No such file"):
        read_key(tmp_path / "absent")


def test_a_key_does_not_show_its_secret() -> None:
    key = new_key()
    assert key.secret not in repr(key)
    assert key.public in repr(key)
