"""Block hashes name content: equal exactly when everything the KV depends on is equal."""

import hashlib
import random
import struct
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.hashes import HASH_BYTES, extend_hashes, root_hash

KEY = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
FIELDS = st.tuples(*[st.text(max_size=4)] * 5)


def _root(fields: tuple[str, ...] = ("m", "float32", "", "", ""), key: bytes = KEY) -> bytes:
    model, dtype, salt, adapter, extra_key = fields
    return root_hash(key, model=model, dtype=dtype, salt=salt, adapter=adapter, extra_key=extra_key)


def _hashes(
    token_ids: list[int], block_size: int = 4, root: bytes = b"", key: bytes = KEY
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(key, root or _root(), token_ids, block_size, hashes)
    return hashes


def test_hashes_are_those_of_the_written_definition() -> None:
    """Built a second time from the module's docstring, packed by another module."""
    fields = ("qwen", "bfloat16", "tenant é", "lora", "image")
    packed = b"".join(len(f.encode()).to_bytes(8, "little") + f.encode() for f in fields)
    parent = hashlib.blake2b(packed, digest_size=16, key=KEY, person=b"kv block root").digest()
    assert parent == _root(fields)
    seed = random.randrange(2**32)
    token_ids = [random.Random(seed).randrange(200_000) for _ in range(23)]
    expected = []
    for start in range(0, 20, 5):
        block = array("I", token_ids[start : start + 5])
        if sys.byteorder == "big":
            block.byteswap()
        data = parent + block.tobytes()
        parent = hashlib.blake2b(data, digest_size=16, key=KEY, person=b"kv block").digest()
        expected.append(parent)
    assert _hashes(token_ids, 5, _root(fields)) == expected, f"seed {seed}"


def test_hashes_do_not_change_between_processes_and_releases() -> None:
    """Workers compare them, so a change of the definition must be a decision."""
    root = root_hash(KEY, model="m", dtype="float32", salt="s", adapter="a", extra_key="x")
    assert root.hex() == "ab03a2390f9fbfba0740baa3f27ce5e9"
    assert [h.hex() for h in _hashes([1, 2, 3, 70_000, 5], 2, root)] == [
        "21713b3045f1922ee4fe3c615ab130fb",
        "8ff023c9d74998aa50130740e919cbac",
    ]


@given(FIELDS, FIELDS)
def test_roots_are_equal_only_for_equal_fields(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert (_root(a) == _root(b)) == (a == b)


def test_moving_a_character_to_the_next_field_gives_another_root() -> None:
    assert _root(("ab", "c", "", "", "")) != _root(("a", "bc", "", "", ""))
    assert _root(("m", "d", "s", "", "x")) != _root(("m", "d", "s", "x", ""))


def test_a_lone_surrogate_in_a_salt_is_hashed_not_refused() -> None:
    assert _root(("m", "d", "\ud800", "", "")) != _root(("m", "d", "\ud801", "", ""))


@given(TOKENS, st.integers(1, 7), st.lists(st.integers(0, 40), max_size=5))
def test_growing_in_pieces_gives_the_hashes_of_the_whole(
    token_ids: list[int], block_size: int, cuts: list[int]
) -> None:
    hashes: list[bytes] = []
    for cut in sorted(cuts):
        extend_hashes(KEY, _root(), token_ids[:cut], block_size, hashes)
        assert len(hashes) == min(cut, len(token_ids)) // block_size
    extend_hashes(KEY, _root(), token_ids, block_size, hashes)
    assert hashes == _hashes(token_ids, block_size)
    assert all(len(h) == HASH_BYTES for h in hashes)


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_on_the_common_prefix(a: list[int], b: list[int]) -> None:
    for i, (hash_a, hash_b) in enumerate(zip(_hashes(a, 3), _hashes(b, 3), strict=False)):
        assert (hash_a == hash_b) == (a[: 3 * (i + 1)] == b[: 3 * (i + 1)])


def test_equal_tokens_under_another_root_or_key_share_nothing() -> None:
    token_ids = list(range(9))
    plain = _hashes(token_ids)
    salted = _hashes(token_ids, root=_root(("m", "float32", "tenant", "", "")))
    rekeyed = _hashes(token_ids, key=bytes(32))
    assert len({*plain, *salted, *rekeyed}) == 6


def test_equal_blocks_at_other_positions_have_other_hashes() -> None:
    assert len(set(_hashes([7] * 40))) == 10


def test_a_token_id_that_does_not_fit_is_an_error() -> None:
    for token_id in (-1, 2**32):
        with pytest.raises(struct.error):
            _hashes([1, 2, 3, token_id])


def test_more_hashes_than_tokens_is_an_error() -> None:
    hashes = _hashes(list(range(12)))
    with pytest.raises(AssertionError, match="3 hashes known for 11 tokens in blocks of 4"):
        extend_hashes(KEY, _root(), list(range(11)), 4, hashes)


@pytest.mark.parametrize("num_bytes", [0, 15, 65])
def test_a_key_too_short_to_be_secret_or_too_long_is_refused(num_bytes: int) -> None:
    with pytest.raises(AssertionError, match=f"has {num_bytes} bytes, not 16 to 64"):
        _root(key=bytes(num_bytes))
