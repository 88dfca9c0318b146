import os
from pathlib import Path

from sparkcache_connector.store.residency import is_resident


def test_a_range_is_resident_only_if_all_of_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A kernel without cachestat(2) says no to everything, which is a safe answer.
        whole = is_resident(descriptor, 0, 1 << 20)
        assert whole == is_resident(descriptor, 4096, 4096)
        assert not is_resident(descriptor, 0, 1 << 21)
    finally:
        os.close(descriptor)
    assert not is_resident(descriptor, 0, 4096)
