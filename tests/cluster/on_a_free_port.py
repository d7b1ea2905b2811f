"""The application for `serve run`, on a port that the test chose: the command itself has no option.

serve run tests.cluster.on_a_free_port:build port=PORT config=FILE
"""

from ray.serve import Application
from ray.serve.config import HTTPOptions

import serve_app


def build(args: dict[str, str]) -> Application:
    HTTPOptions.model_fields["port"].default = int(args.pop("port"))
    HTTPOptions.model_rebuild(force=True)
    return serve_app.build(args)
