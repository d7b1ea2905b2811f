"""Has Serve listen on the host and port that were asked for: `serve run` has no option for them.

Serve listens where it was told when it was started, and `serve run` starts it after Ray, on
127.0.0.1:8000. So Serve is started here, as soon as Ray has started; `serve run` then finds it.
"""

import socket
import threading

import ray
from ray import serve
from ray._private import worker as ray_worker  # Ray has no public hook behind ray.init
from ray.serve.config import HTTPOptions

from actors.observability.logs import leave_out
from configs.errors import ConfigFileError
from configs.load import ListenAddress

# What `serve run` says when it finds Serve: that options for HTTP will not be applied. It has none
# of its own, and ours are applied.
FOUND_SERVE = "Connecting to existing Serve app"


def listen_on(address: ListenAddress) -> None:
    """Starts Serve at this address once Ray has started here; call it in the main thread.

    Raises ConfigFileError, before anything starts, if the address is taken or none of this
    machine's, or if this process does not start Serve: `serve deploy` and `serve run FILE.yaml`
    build the application in a cluster where Serve listens already.
    """
    if threading.current_thread() is not threading.main_thread() or ray.is_initialized():
        raise ConfigFileError(
            "host and port: Serve listens already, where its own file says; set http_options in"
            " that file, and leave host, port, LAPS_HOST and LAPS_PORT out"
        )
    asked = {"host": address.host, "port": address.port}
    options = HTTPOptions.model_validate({name: x for name, x in asked.items() if x is not None})
    assert options.host is not None, "Serve has a default host"
    _check_free(options.host, options.port)

    def start() -> None:
        if serve.status().proxies:
            raise ConfigFileError(
                f"{options.host}:{options.port}: Serve runs already in this Ray cluster and stays"
                " where it listens; leave host and port out, or stop it with `serve shutdown`"
            )
        serve.start(http_options=options)
        leave_out("ray.serve", FOUND_SERVE)

    ray_worker._post_init_hooks.append(start)


def _check_free(host: str, port: int) -> None:
    """Raises ConfigFileError if nobody could listen there. Serve would share a port silently."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but not REUSEPORT
            probe.bind(place)
            probe.listen()
    except OSError as error:
        raise ConfigFileError(
            f"{host}:{port}: nothing can listen there ({error.strerror}); stop what does, or choose"
            " another address: host= and port=, LAPS_HOST and LAPS_PORT, or make serve HOST= PORT="
        ) from error
