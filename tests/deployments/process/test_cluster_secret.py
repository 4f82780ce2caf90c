"""Where the block-hash key comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.deployments.process import cluster_secret
from app.deployments.process.cluster_secret import KEY_FILE_VARIABLE, load_block_hash_key
from app.errors import ConfigError


def test_mounted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(file))
    key = load_block_hash_key()
    assert len(key) == 32
    assert key == load_block_hash_key()
    file.write_bytes(b"0123456789abcdeX")
    assert key != load_block_hash_key()


@pytest.mark.parametrize("content", [None, b"short"])
def test_bad_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(file))
    with pytest.raises(ConfigError, match=str(file)) as error:
        load_block_hash_key()
    assert error.value.param == KEY_FILE_VARIABLE


def test_first_replica_makes_it_and_all_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[tuple[bytes, bytes], bytes] = {}

    def put(name: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert not overwrite
        store.setdefault((namespace, name), value)

    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(cluster_secret, "_internal_kv_put", put)
    monkeypatch.setattr(cluster_secret, "_internal_kv_get", lambda name, namespace: store.get((namespace, name)))
    first = load_block_hash_key()
    assert load_block_hash_key() == first
    assert list(store.values()) == [first]
    store.clear()
    assert load_block_hash_key() != first  # another cluster, another key
