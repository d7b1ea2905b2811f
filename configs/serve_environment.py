"""What Ray Serve's processes read from the environment when they start, set for `serve run`.

`serve run` imports the application before it starts Ray, whose processes inherit what is set here.
On a cluster that runs already the operator sets it, or does without.
"""

import os

HTTP_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MIDDLEWARES = "actors.header_text:middlewares"


def set_serve_environment() -> None:
    """Name our middlewares to Serve, unless the operator has named others."""
    os.environ.setdefault(HTTP_CALLBACK, MIDDLEWARES)
