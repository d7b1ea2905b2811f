"""Hashers that were told the same give the same names, in whatever process they are."""

import random
import secrets

import msgspec
import pytest

from engine.kv.hashes import BlockHashParams, RequestHasher
from engine.request import Request, RequestKey, RequestSpec, SamplingParams

NAMING = BlockHashParams(key=secrets.token_bytes(32), model="m", dtype="bfloat16", block_size=3)
TOKENS = [random.randrange(2**32) for _ in range(random.randint(3, 40))]


def worker_names(hasher: RequestHasher, tokens: list[int], salt: str) -> list[bytes]:
    """As a worker names the blocks of a request, in two parts."""
    request = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=1), salt=salt),
        key=RequestKey("r"),
        ingress_id="ingress",
        tokens=tokens[: len(tokens) // 2],
        num_prompt_tokens=len(tokens) // 2,
        arrival_s=0.0,
    )
    hasher.extend(request)
    request.tokens = tokens
    hasher.extend(request)
    return request.block_hashes


def test_a_naming_that_was_sent_gives_the_names_that_a_worker_gives() -> None:
    worker = RequestHasher(
        NAMING.key, model=NAMING.model, dtype=NAMING.dtype, block_size=NAMING.block_size
    )
    assert worker.hash_params == NAMING
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(worker.hash_params), type=BlockHashParams)
    assert hash(sent) == hash(NAMING)  # hashers are kept by it
    for salt in ("", "tenant é"):
        names = RequestHasher.of(sent).chain(TOKENS, salt)
        assert len(names) == len(TOKENS) // 3
        assert names == worker_names(worker, TOKENS, salt)


@pytest.mark.parametrize(
    "other",
    [{"key": secrets.token_bytes(32)}, {"model": "n"}, {"dtype": "float32"}, {"num_ahead": 1}],
)
def test_another_naming_gives_other_names(other: dict[str, object]) -> None:
    theirs = RequestHasher.of(msgspec.structs.replace(NAMING, **other)).chain(TOKENS, "")
    assert set(theirs).isdisjoint(RequestHasher.of(NAMING).chain(TOKENS, ""))


def test_a_name_may_cover_the_next_token() -> None:
    naming = msgspec.structs.replace(NAMING, num_ahead=1)
    hasher = RequestHasher.of(naming)
    assert hasher.hash_params == naming
    names = hasher.chain(TOKENS, "")
    assert names == worker_names(hasher, TOKENS, "")
    assert len(names) == (len(TOKENS) - 1) // 3
    for place, name in enumerate(names):
        end = 3 * (place + 1)
        assert len(hasher.chain(TOKENS[:end], "")) == place
        others = hasher.chain([*TOKENS[:end], TOKENS[end] ^ 1, *TOKENS[end + 1 :]], "")
        assert others[:place] == names[:place]
        assert others[place] != name
