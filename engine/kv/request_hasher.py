"""Block hashes of requests: which chain a request belongs to. The hashing itself is block_hash."""

from functools import lru_cache

from engine.kv.block_hash import extend_hashes, root_hash
from engine.request import Request


class RequestHasher:
    """Extends `Request.block_hashes` under one model, dtype and key.

    Hashes are compared only within one worker, which draws its own key.
    """

    def __init__(self, key: bytes, *, model: str, dtype: str, block_size: int) -> None:
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
