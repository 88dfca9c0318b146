import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.store.errors import Miss, Reason
from sparkcache_connector.store.pack import (
    ALIGNMENT,
    HEADER_DIGEST_END,
    PackHeader,
    pack_id_of,
    pack_name,
    page_digest,
    stride,
)

HEADER = PackHeader(bytes(range(16)), 123 * ALIGNMENT)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1))
def test_header_round_trips(pack_id: bytes, size: int) -> None:
    header = PackHeader(pack_id, size)
    block = header.encode()
    assert len(block) == ALIGNMENT
    assert PackHeader.parse(block) == header


def test_every_flipped_bit_of_the_header_block_is_found() -> None:
    block = HEADER.encode()
    for bit in [*range(8 * HEADER_DIGEST_END), *range(8 * HEADER_DIGEST_END, 8 * ALIGNMENT, 97)]:
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Miss) as caught:
            PackHeader.parse(bytes(damaged))
        assert caught.value.reason in {Reason.MALFORMED, Reason.NEWER_FORMAT}


def test_a_later_version_is_not_called_damaged() -> None:
    block = bytearray(HEADER.encode())
    block[8] = 2
    with pytest.raises(Miss, match="pack version 2") as caught:
        PackHeader.parse(bytes(block))
    assert caught.value.reason is Reason.NEWER_FORMAT


@given(st.binary(max_size=2 * ALIGNMENT))
def test_no_bytes_crash_the_header_parser(data: bytes) -> None:
    with pytest.raises(Miss):
        PackHeader.parse(data)


@given(st.binary(min_size=16, max_size=16))
def test_names_round_trip(pack_id: bytes) -> None:
    assert pack_id_of(pack_name(pack_id)) == pack_id


@pytest.mark.parametrize(
    "name",
    ["", ".pack", "00.pack", "0" * 32, "A" * 32 + ".pack", "g" * 32 + ".pack", ".tmp-00"],
)
def test_other_names_are_no_packs(name: str) -> None:
    assert pack_id_of(name) is None


@given(st.integers(1, 1 << 30))
def test_stride_is_the_next_multiple_of_the_alignment(size: int) -> None:
    assert stride(size) % ALIGNMENT == 0
    assert 0 <= stride(size) - size < ALIGNMENT


def test_page_digests_have_a_domain_of_their_own() -> None:
    from blake3 import blake3

    assert page_digest(b"page") != blake3(b"page").digest()
    assert page_digest(b"page").hex() == (
        "431215ce4bb8d192b022d21b131b1bcae9401da762718ced2b284e2382851a79"
    )
