import os
import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.telemetry.health import Health, HealthPage, read_health
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.worker.watch import Watch

SICK = Health(
    pid=7, off={"publish": "disk-full"}, failures={"restores": {"deadline": 2}, "roots": {}}
)
words = st.text("abc_-", min_size=1, max_size=8)


@given(
    st.builds(
        Health,
        pid=st.integers(1, 1 << 22),
        off=st.dictionaries(words, words, max_size=2),
        failures=st.dictionaries(
            words, st.dictionaries(words, st.integers(1, 1 << 40), max_size=9), max_size=3
        ),
    )
)
def test_page_is_one_page_and_says_what_was_written(health):
    data = health.to_bytes()
    assert len(data) == 4096
    assert Health.parse(data) == health


@given(st.binary(max_size=300) | st.just(b"[]") | st.just(b'{"schema": "sparkcache-health/v1"}'))
def test_no_bytes_crash_the_reader(data):
    assert Health.parse(data) is None


def test_torn_page_and_one_with_values_of_another_kind_are_no_page():
    assert Health.parse(SICK.to_bytes()[:40]) is None
    assert Health.parse(SICK.to_bytes().replace(b"7", b'"7"')) is None
    assert Health.parse(SICK.to_bytes().replace(b"v1", b"v2")) is None


def test_state_that_does_not_fit_is_refused_by_size():
    many = {str(number): number for number in range(1_000)}
    with pytest.raises(ValueError, match="larger than its page of 4096"):
        Health(pid=1, failures={"restores": many}).to_bytes()


def test_page_is_private_is_rewritten_in_place_and_outlives_its_writer(tmp_path):
    path = tmp_path / "health" / "rank-0.json"
    page = HealthPage(path)
    assert read_health(path) is None
    page.write(Health(pid=1))
    inode = path.stat().st_ino
    page.write(SICK)
    page.close()
    assert read_health(path) == SICK
    assert path.stat().st_ino == inode
    assert path.stat().st_size == 4096
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_page_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "health").mkdir()
    (tmp_path / "health" / "rank-0.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        HealthPage(tmp_path / "health" / "rank-0.json")
    assert not (tmp_path / "elsewhere").exists()


def test_watch_tells_what_is_off_until_it_is_on_again_and_what_failed(tmp_path):
    counts, off = Counts(), {}
    path = tmp_path / "health" / "rank-3.json"
    watch = Watch(3, counts, off=lambda: off, page=HealthPage(path))
    assert read_health(path) == Health(
        pid=os.getpid(), failures={"restores": {}, "publications": {}, "roots": {}}
    )
    off["publish"] = "disk-full"
    counts.add("sparkcache_restore_failures_total", "deadline")
    counts.take()
    counts.add("sparkcache_restore_failures_total", "deadline")
    deadline = time.monotonic() + 20
    while read_health(path).off != {"publish": "disk-full"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert read_health(path).failures["restores"] == {"deadline": 2}
    off.clear()
    watch.close()
    assert read_health(path).off == {}


def test_watch_goes_on_when_its_page_cannot_be_written(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    page = HealthPage(tmp_path / "health" / "rank-0.json")
    monkeypatch.setattr(page, "write", full)
    counts = Counts()
    watch = Watch(0, counts, off=dict, page=page)
    assert "the state of rank 0 cannot be described" in caplog.text
    watch.look()
    watch.close()
