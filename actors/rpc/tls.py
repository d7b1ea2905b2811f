"""Encryption of connections for calls: as Ray encrypts its own, with the same files.

Both ends show a certificate signed by the cluster's authority. Names in certificates are not
checked: a holder may run on any node, and the secret decides what it may call.
"""

import ssl
from functools import lru_cache

from configs.process_environment import TlsFiles, ray_tls


@lru_cache
def server_tls() -> ssl.SSLContext | None:
    """Returns the TLS context, None = not encrypted. Raises ConfigFileError or OSError."""
    return _context(ssl.Purpose.CLIENT_AUTH, ray_tls())


@lru_cache
def client_tls() -> ssl.SSLContext | None:
    """Returns the caller's TLS context; otherwise as `server_tls`."""
    return _context(ssl.Purpose.SERVER_AUTH, ray_tls())


def _context(purpose: ssl.Purpose, files: TlsFiles | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    context = ssl.create_default_context(purpose, cafile=files.authority)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    return context
