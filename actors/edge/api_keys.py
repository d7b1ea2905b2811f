"""Who a client is: the name of the API key it sent, found in constant time."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

Headers = Iterable[tuple[bytes, bytes]]  # as ASGI has them: names in lower case

ANYBODY = ""  # the name of a client where no keys are configured


class ApiKeys:
    """The configured keys, as digests."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        """digests: name -> SHA-256 of the key, in hex."""
        self._digests = [(name, bytes.fromhex(digest)) for name, digest in digests.items()]

    def name_of(self, key: bytes) -> str | None:
        """The key's name, None for one that is not configured.

        Every digest is compared, and each in constant time, so that how long this takes tells
        nothing.
        """
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def bearer_key(headers: Headers) -> bytes | None:
    """What follows `Bearer` in the Authorization header.

    None if there is none, or several: two servers could read two of them differently.
    """
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None
