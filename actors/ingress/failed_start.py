"""Ends `serve run` with the reason and exit status 1 if the application cannot be started.

Serve's own `serve run` prints that deployments could not be updated, shuts Serve down and exits
with 0, as after Ctrl-C. Why is known to Serve's status alone, which ends with it. And a script, a
container and systemd's `Restart=on-failure` look at nothing but the exit status.
"""

import sys
import threading
import traceback
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

COMMAND_LINE = "ray.serve.scripts"  # the module behind `serve run`; nothing else imports it


def is_serve_run() -> bool:
    """Whether this process is `serve run`, not a program that calls `serve.run` itself."""
    return COMMAND_LINE in sys.modules


def fail_where_start_fails() -> None:
    """Lets the next `serve.run` of `serve run` end the process with 1 where it raises.

    Later ones are those of `serve run --reload`, which goes on after an error. A program that calls
    `serve.run` itself gets its exceptions, as ever.
    """
    if threading.current_thread() is not threading.main_thread() or ray.is_initialized():
        return
    if not is_serve_run():
        return
    run = serve.run

    def run_or_exit(*args: Any, **options: Any) -> DeploymentHandle[Any]:  # noqa: ANN401 - passed on
        serve.run = run
        try:
            return run(*args, **options)
        except Exception:  # noqa: BLE001 - `serve run` ends with any of them, too
            traceback.print_exc()
            _print_reasons()
            serve.shutdown()  # type: ignore[no-untyped-call]
            raise SystemExit(1) from None

    serve.run = run_or_exit


def _print_reasons() -> None:
    """Prints what Serve knows of the deployments that did not start; never raises."""
    try:
        applications = serve.status().applications
    except Exception:  # noqa: BLE001 - Serve itself may be what has failed
        traceback.print_exc()
        return
    for application in applications.values():
        for name, deployment in application.deployments.items():
            if deployment.message:
                print(f"{name} is {deployment.status.value}: {deployment.message}", file=sys.stderr)
