"""Computes hashes that name the content of KV blocks: chained, keyed, over all tokens so far.

A block's hash covers everything its KV depends on: model, dtype, adapter, tenant salt and all
tokens from the start of the sequence to the end of the block. Two blocks with equal hashes are
interchangeable. Without the key no one can compute a hash or construct a collision. `RequestHasher`
knows which chain a request belongs to. Knows no blocks and no index.

    root    = H(model, dtype, salt, adapter, extra_key)
    hash[0] = H(root    | tokens of block 0)
    hash[i] = H(hash[i-1] | tokens of block i)
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Self

import msgspec

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
) -> None:
    """Append to `hashes` the hash of every full block of `token_ids` that it does not cover yet.

    `hashes[i]` must name tokens [0, (i + 1) * block_size) under the same key and root. The cost is
    one division if there is no new full block. Token ids are packed as little-endian uint32; one
    outside [0, 2**32) raises struct.error.
    """
    num_known = len(hashes)
    num_full = len(token_ids) // block_size
    if num_full == num_known:
        return
    assert num_full > num_known, (
        f"{num_known} hashes known for {len(token_ids)} tokens in blocks of {block_size}"
    )
    pack, keyed = _packer(block_size), _keyed(key)
    parent = hashes[-1] if hashes else root
    for start in range(num_known * block_size, num_full * block_size, block_size):
        block = keyed.copy()
        block.update(parent + pack(*token_ids[start : start + block_size]))
        parent = block.digest()
        hashes.append(parent)


@lru_cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{block_size}I").pack


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


class RequestHasher:
    """Hashes blocks under one model, dtype and key; hashes of equal hashers are comparable."""

    @classmethod
    def of(cls, hash_params: BlockHashParams) -> Self:
        return cls(
            hash_params.key,
            model=hash_params.model,
            dtype=hash_params.dtype,
            block_size=hash_params.block_size,
        )

    def __init__(self, key: bytes, *, model: str, dtype: str, block_size: int) -> None:
        self.hash_params = BlockHashParams(key=key, model=model, dtype=dtype, block_size=block_size)
        self._key = key
        self._block_size = block_size
        self._root = lru_cache(maxsize=4096)(
            lambda salt: root_hash(key, model=model, dtype=dtype, salt=salt)
        )

    def extend(self, request: Request) -> None:
        """Append the hash of every full block of the request's known tokens."""
        extend_hashes(
            self._key,
            self._root(request.spec.salt),
            request.tokens,
            self._block_size,
            request.block_hashes,
        )

    def chain(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """The hashes [16 bytes each] of a prompt's full blocks, without a `Request`."""
        hashes: list[bytes] = []
        extend_hashes(self._key, self._root(salt), token_ids, self._block_size, hashes)
        return hashes
