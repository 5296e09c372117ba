"""The RocksDB store of the key index, without the index itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker.streams.key_index_rocksdb import ENTRIES_MAX, KeyStore

LOG, NEXT, LAST = 7, 8, (1 << 63) - 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    store = KeyStore(str(tmp_path / "keys"))
    yield store
    store.close()


def test_the_last_offset_of_a_key_is_found_and_logs_do_not_see_each_other(store: KeyStore) -> None:
    store.put(LOG, [(b"a", 1), (b"b", 2), (b"a", 3)], 4)
    store.put(NEXT, [(b"a", 9), (b"", 10)], 11)
    assert [store.find(LOG, key) for key in (b"a", b"b", b"", b"c")] == [3, 2, None, None]
    assert [store.find(NEXT, key) for key in (b"a", b"")] == [9, 10]
    assert [store.end(log_id) for log_id in (LOG, NEXT, 9)] == [4, 11, 0]
    assert sorted(store.logs()) == [LOG, NEXT]


def test_any_bytes_are_a_key(store: KeyStore) -> None:
    keys = [bytes([byte]) for byte in range(256)] + [b"\xff" * 300, b"x" * 100_000]
    store.put(LOG, list(zip(keys, range(len(keys)), strict=True)), len(keys))
    assert [store.find(LOG, key) for key in keys] == list(range(len(keys)))


def test_the_key_index_is_reused_after_a_clean_stop(tmp_path: Path) -> None:
    for start in range(0, 3000, 1000):
        store = KeyStore(str(tmp_path / "keys"))
        assert store.end(LOG) == start
        store.put(LOG, [(b"%d" % number, number) for number in range(start, start + 1000)], start + 1000)
        store.close()
    store = KeyStore(str(tmp_path / "keys"))
    assert [store.find(LOG, b"%d" % number) for number in range(3000)] == list(range(3000))
    store.close()


def test_many_entries_go_in_several_writes_each_with_its_end(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    write = store._db.write

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

        def write(self, batch: object) -> None:
            write(batch)
            ends.append(store.end(LOG))

    db, store._db = store._db, Watched()
    store.put(LOG, [(b"%d" % number, number) for number in range(2 * ENTRIES_MAX + 1)], 5000)
    store._db = db
    assert ends == [ENTRIES_MAX, 2 * ENTRIES_MAX, 5000]


def test_index_entries_of_removed_records_are_removed(store: KeyStore) -> None:
    store.put(LOG, [(b"%05d" % number, number) for number in range(3000)], 3000)
    store.put(NEXT, [(b"x", 1)], 2)
    assert store.forget(LOG, 2500) == 2500
    assert [store.find(LOG, b"%05d" % number) for number in (0, 2499, 2500, 2999)] == [None, None, 2500, 2999]
    assert store.find(NEXT, b"x") == 1


@pytest.mark.parametrize("log_id", [LOG, LAST])
def test_a_log_is_dropped_with_all_its_keys(store: KeyStore, log_id: int) -> None:
    store.put(log_id, [(b"a", 1), (b"\xff\xff", 2)], 3)
    store.put(log_id - 1, [(b"a", 5)], 6)
    store.drop(log_id)
    assert (store.end(log_id), store.find(log_id, b"a"), store.find(log_id, b"\xff\xff")) == (0, None, None)
    assert store.find(log_id - 1, b"a") == 5
    assert store.logs() == [log_id - 1]


def test_a_store_that_cannot_be_read_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "keys"
    store = KeyStore(str(folder))
    store.put(LOG, [(b"a", 1)], 2)
    store.close()
    (folder / "CURRENT").write_bytes(b"rot")
    again = KeyStore(str(folder))
    assert again.end(LOG) == 0
    assert "is rebuilt" in caplog.text
    again.close()
