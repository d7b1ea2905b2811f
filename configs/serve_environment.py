"""What Ray Serve's processes read from the environment when they start, set for `serve run`.

`serve run` imports the application before it starts Ray, whose processes inherit what is set here.
On a cluster that runs already the operator sets it, or does without.
"""

import os

HTTP_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MIDDLEWARES = "actors.header_text:middlewares"
# A replica behind HAProxy stays for at least so long after its last request (Serve: 30 s, in which
# a container that is stopped would be killed); HAProxy takes it out within half a second.
MIN_DRAINING = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
MIN_DRAINING_S = 3.0


def set_serve_environment() -> None:
    """What the operator has set himself stays."""
    os.environ.setdefault(HTTP_CALLBACK, MIDDLEWARES)
    os.environ.setdefault(MIN_DRAINING, str(MIN_DRAINING_S))
