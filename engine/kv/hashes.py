"""Computes hashes that name the content of KV blocks: chained, keyed, over all tokens so far.

A block's hash covers everything its KV depends on: model, dtype, adapter, tenant salt and all
tokens from the start of the sequence to the end of the block. Two blocks with equal hashes are
interchangeable. Without the key no one can compute a hash or construct a collision. `RequestHasher`
knows which chain a request belongs to. Knows no blocks and no index.

    root    = H(model, dtype, salt, adapter, extra_key)
    hash[0] = H(root    | tokens of block 0)
    hash[i] = H(hash[i-1] | tokens of block i)

What EAGLE-3 heads and MTP layers keep of a token depends on the next token, too. Where one drafts,
the tokens of a block in these formulas are one more: the first token of the next block, which must
be known. So requests whose texts part at the end of a block share the blocks before that one only.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Self

import msgspec

from engine.kv.layout import KvLayout
from engine.request import Request

HASH_BYTES = 16
MIN_KEY_BYTES = 16  # shorter keys can be brute-forced; blake2b takes an empty key for no key
MAX_KEY_BYTES = blake2b.MAX_KEY_SIZE

# Domain separation: a root never equals a block's hash, whatever a client puts into the fields.
_ROOT_DOMAIN = b"kv block root"
_BLOCK_DOMAIN = b"kv block"


def root_hash(
    key: bytes,
    *,
    model: str,
    dtype: str,
    salt: str,
    adapter: str = "",
    extra_key: str = "",
) -> bytes:
    """The hash [16 bytes] that starts all chains of one (model, dtype, salt, adapter, extra_key).

    Every field is preceded by its length, so moving a character from one field to the next gives
    another root. `key` is a secret of 16 to 64 bytes, equal wherever hashes are compared.
    """
    assert MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES, (
        f"the block hash key has {len(key)} bytes, not {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
    )
    digest = blake2b(digest_size=HASH_BYTES, key=key, person=_ROOT_DOMAIN)
    for field in (model, dtype, salt, adapter, extra_key):
        # surrogatepass: JSON can carry lone surrogates, and they must not fail a request here.
        data = field.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def extend_hashes(
    key: bytes,
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    hashes: list[bytes],
    *,
    num_ahead: int = 0,
) -> None:
    """Append to `hashes` the hash of every full block of `token_ids` that it does not cover yet.

    num_ahead: known tokens behind a block that its hash covers besides. `hashes[i]` must name
    tokens [0, (i + 1) * block_size + num_ahead) under the same key and root. The cost is one
    division if there is no new full block. Token ids are packed as little-endian uint32; one
    outside [0, 2**32) raises struct.error.
    """
    num_known = len(hashes)
    num_full = max(0, len(token_ids) - num_ahead) // block_size
    if num_full == num_known:
        return
    assert num_full > num_known, (
        f"{num_known} hashes known for {len(token_ids)} tokens in blocks of {block_size}"
    )
    num_covered = block_size + num_ahead
    pack, keyed = _packer(num_covered), _keyed(key)
    parent = hashes[-1] if hashes else root
    for start in range(num_known * block_size, num_full * block_size, block_size):
        block = keyed.copy()
        block.update(parent + pack(*token_ids[start : start + num_covered]))
        parent = block.digest()
        hashes.append(parent)


@lru_cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{num_tokens}I").pack


@lru_cache
def _keyed(key: bytes) -> blake2b:
    """The keyed initial state of a block hash, to be copied: keying costs as much as a block."""
    return blake2b(digest_size=HASH_BYTES, key=key, person=_BLOCK_DOMAIN)


class BlockHashParams(msgspec.Struct, frozen=True, kw_only=True):
    """What block hashes depend on besides tokens and salt, for hashing in other processes."""

    key: bytes  # a secret of the application
    model: str
    dtype: str
    block_size: int  # tokens
    num_ahead: int = 0  # tokens behind a block that its hash covers besides


class RequestHasher:
    """Hashes blocks under one model, dtype and key; hashes of equal hashers are comparable."""

    @classmethod
    def of(cls, hash_params: BlockHashParams) -> Self:
        return cls(
            hash_params.key,
            model=hash_params.model,
            dtype=hash_params.dtype,
            block_size=hash_params.block_size,
            num_ahead=hash_params.num_ahead,
        )

    @classmethod
    def of_blocks(cls, key: bytes, model: str, layout: KvLayout) -> Self:
        """Of blocks of this layout, which a model with this fingerprint fills."""
        return cls(
            key,
            model=model,
            dtype=layout.numbers,
            block_size=layout.block_size,
            num_ahead=layout.num_hashed_ahead,
        )

    def __init__(
        self, key: bytes, *, model: str, dtype: str, block_size: int, num_ahead: int = 0
    ) -> None:
        self.hash_params = BlockHashParams(
            key=key, model=model, dtype=dtype, block_size=block_size, num_ahead=num_ahead
        )
        self._key = key
        self._block_size = block_size
        self._num_ahead = num_ahead
        self._root = lru_cache(maxsize=4096)(
            lambda salt: root_hash(key, model=model, dtype=dtype, salt=salt)
        )

    def extend(self, request: Request) -> None:
        """Append the hash of every full block of the request that its known tokens give."""
        self._extend(request.tokens, request.spec.salt, request.block_hashes)

    def chain(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """The hashes [16 bytes each] of a prompt's full blocks, without a `Request`."""
        hashes: list[bytes] = []
        self._extend(token_ids, salt, hashes)
        return hashes

    def _extend(self, token_ids: Sequence[int], salt: str, hashes: list[bytes]) -> None:
        root, size = self._root(salt), self._block_size
        extend_hashes(self._key, root, token_ids, size, hashes, num_ahead=self._num_ahead)
