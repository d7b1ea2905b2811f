"""Whether Ray encrypts what its processes say to each other, and with which files."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from configs.errors import ConfigFileError

USE = "RAY_USE_TLS"
FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files, the same variables that Ray reads."""

    certificate: str
    key: str
    authority: str  # that signed the certificates of all nodes


def ray_tls(environ: Mapping[str, str] | None = None) -> TlsFiles | None:
    """None = Ray encrypts nothing. Raises ConfigFileError if it should and a file is not named."""
    environ = os.environ if environ is None else environ
    if environ.get(USE, "0").lower() not in ("1", "true"):
        return None
    missing = [name for name in FILES if not environ.get(name)]
    if missing:
        raise ConfigFileError(f"{USE} is set, and {', '.join(missing)} is not: see Ray's TLS guide")
    certificate, key, authority = (environ[name] for name in FILES)
    return TlsFiles(certificate=certificate, key=key, authority=authority)
