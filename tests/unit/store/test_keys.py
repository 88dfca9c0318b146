import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.store.errors import Unusable
from sparkcache_connector.store.keys import Key, KeyRing

secret = st.binary(min_size=32, max_size=32)


@given(st.lists(secret, min_size=1, max_size=5, unique=True))
def test_rings_round_trip(secrets: list[bytes]) -> None:
    ring = KeyRing(tuple(map(Key, secrets)))
    assert KeyRing.parse(ring.encode(), "keys") == ring


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_parser(data: bytes) -> None:
    with pytest.raises(Unusable):
        KeyRing.parse(data, "keys")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "does not begin with"),
        ("sparkcache-keys 2\n" + "0" * 64 + "\n", "does not begin with"),
        ("sparkcache-keys 1\n", "holds no key"),
        ("sparkcache-keys 1\n" + "0" * 63 + "\n", "line 2 of keys is not 64"),
        ("sparkcache-keys 1\n" + "A" * 64 + "\n", "line 2 of keys is not 64"),
        ("sparkcache-keys 1\n" + ("0" * 64 + "\n") * 2, "holds a key twice"),
        ("sparkcache-keys 1\n" + "0" * 64 + "\n\n", "line 3 of keys is not 64"),
    ],
)
def test_a_malformed_key_file_is_refused_by_line(text: str, found: str) -> None:
    with pytest.raises(Unusable, match=found):
        KeyRing.parse(text.encode(), "keys")


def test_no_message_and_no_repr_shows_a_secret() -> None:
    key = Key(b"\xab" * 32)
    assert "abab" not in repr(KeyRing((key,)))
    with pytest.raises(Unusable) as caught:
        KeyRing.parse(b"sparkcache-keys 1\n" + b"ab" * 32 + b"x\n", "keys")
    assert "abab" not in str(caught.value)


def test_a_new_key_is_in_front_and_the_old_one_can_be_destroyed() -> None:
    ring = KeyRing.generate()
    rotated = ring.with_new_current()
    assert rotated.current != ring.current
    assert rotated.find(ring.current.key_id) == ring.current
    assert rotated.only_current().find(ring.current.key_id) is None
