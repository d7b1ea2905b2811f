"""What other programs read from the environment: Ray's TLS settings and those of Serve's processes.

`serve run` imports the application before it starts Ray, whose processes inherit what is set here.
On a cluster that runs already the operator sets it.
"""

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
    """Returns Ray's TLS files, None = not encrypted. Raises ConfigFileError if one is missing."""
    environ = os.environ if environ is None else environ
    if environ.get(USE, "0").lower() not in ("1", "true"):
        return None
    missing = [name for name in FILES if not environ.get(name)]
    if missing:
        raise ConfigFileError(f"{USE} is set, and {', '.join(missing)} is not: see Ray's TLS guide")
    certificate, key, authority = (environ[name] for name in FILES)
    return TlsFiles(certificate=certificate, key=key, authority=authority)


HTTP_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MIDDLEWARES = "actors.ingress.header_text:middlewares"
# A replica behind HAProxy stays for at least so long after its last request (Serve: 30 s, in which
# a container that is stopped would be killed); HAProxy takes it out within half a second.
MIN_DRAINING = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
MIN_DRAINING_S = 3.0
# A proxy that starts is replaced after three times so long (Serve: 5 s, too little where many
# processes start at once). `serve run` waits a minute for the first one, and fails if it is
# replaced meanwhile.
PROXY_READY = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"
PROXY_READY_S = 20.0
# How long processes of a cluster outlive its GCS (Ray: 60 s): one that we start does not come back.
GCS_AWAY = "RAY_gcs_rpc_server_reconnect_timeout_s"
GCS_AWAY_S = 5

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # "1" = HAProxy takes HTTP connections


def set_serve_environment() -> None:
    """Sets defaults of Serve's, and of a cluster that we start; what the operator has set stays."""
    set_defaults(
        {
            HTTP_CALLBACK: MIDDLEWARES,
            MIN_DRAINING: str(MIN_DRAINING_S),
            PROXY_READY: str(PROXY_READY_S),
        }
    )
    if not ray_address():
        set_defaults({GCS_AWAY: str(GCS_AWAY_S)})


def set_defaults(variables: Mapping[str, str]) -> None:
    """Sets variables for the processes that this one starts; what is set already stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def asked_ha_proxy() -> bool | None:
    """Returns whether the operator asks for HAProxy; None = the operator says nothing."""
    value = os.environ.get(HA_PROXY)
    return None if value is None else value == "1"


def ray_address() -> str | None:
    """Returns the address of the Ray cluster to join; "" = none, by the operator's word.

    None = the operator says nothing: Ray joins the cluster of this machine, if there is one.
    """
    address = os.environ.get("RAY_ADDRESS") or None
    return "" if address == "local" else address
