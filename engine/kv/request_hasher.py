"""Block hashes of requests: which chain a request belongs to. The hashing itself is block_hash."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import msgspec

from engine.kv.block_hash import extend_hashes, root_hash
from engine.request import Request


class BlockNaming(msgspec.Struct, frozen=True, kw_only=True):
    """What the names of blocks depend on besides tokens and salt, for who hashes elsewhere."""

    key: bytes  # a secret of the application
    model: str
    dtype: str
    block_size: int  # tokens


class RequestHasher:
    """Names blocks under one model, dtype and key; hashes of equal hashers may be compared."""

    @classmethod
    def of(cls, naming: BlockNaming) -> Self:
        return cls(naming.key, model=naming.model, dtype=naming.dtype, block_size=naming.block_size)

    def __init__(self, key: bytes, *, model: str, dtype: str, block_size: int) -> None:
        self.naming = BlockNaming(key=key, model=model, dtype=dtype, block_size=block_size)
        self._key = key
        self._block_size = block_size
        self._root = lru_cache(maxsize=4096)(
            lambda salt: root_hash(key, model=model, dtype=dtype, salt=salt)
        )

    def extend(self, request: Request) -> None:
        """Append the hash of every full block of the request's known tokens."""
        extend_hashes(
            self._key,
            self._root(request.salt),
            request.tokens,
            self._block_size,
            request.block_hashes,
        )

    def chain(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """The hashes [16 bytes each] of the full blocks of a prompt that is no request here."""
        hashes: list[bytes] = []
        extend_hashes(self._key, self._root(salt), token_ids, self._block_size, hashes)
        return hashes
