"""Composition root: `serve run serve_app:app`, `serve run serve_app:build config=... model=...`.

Reads the config and binds the one Serve deployment; every other actor is created by the Supervisor
(actors/supervisor.py). `build` itself creates no actor: a YAML deploy runs it in a task.
"""

import sys
from types import TracebackType
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig
from ray.serve.schema import LoggingConfig

from actors.ingress.failed_start import fail_where_start_fails
from actors.ingress.graceful_stop import stop_gracefully_on_signals
from actors.ingress.http_proxy import set_http_proxy
from actors.ingress.listening import listen_on
from actors.ingress.routes import Ingress
from actors.lifecycle.deployment import (
    SUPERVISOR,
    DeploymentSpec,
    describe_deployment,
    supervisor_options,
)
from actors.lifecycle.hub import fetch_model
from actors.lifecycle.preflight import check_startable
from configs.errors import ConfigFileError
from configs.load import config_from_environment, listen_address
from configs.process_environment import set_serve_environment
from configs.schema import EdgeConfig
from engine.errors import ConfigError
from engine.kv.host import shared_file


def build(args: dict[str, str]) -> Application:
    """The Serve application.

    `args` may name `config` (a YAML file), `model` (a folder, or a name on the Hugging Face Hub),
    and `host` and `port` to listen on.

    Raises ConfigError or ConfigFileError, before anything starts, for what cannot be served.
    """
    try:
        config = fetch_model(config_from_environment(args))
        check_startable(config)
        address = listen_address(args)
        if address is not None:
            listen_on(address)
        folder = set_http_proxy(config.edge.http_proxy)
        set_serve_environment()
        spec = describe_deployment(config)
    except (ConfigError, ConfigFileError):
        _print_without_traceback(ConfigError, ConfigFileError)
        raise
    fail_where_start_fails()
    stop_gracefully_on_signals(
        config.edge.drain_s,
        clean_up=lambda: shared_file.remove(shared_file.name_for(spec.block_key)),
        folder=folder,
    )
    return bind(spec)


def bind(spec: DeploymentSpec) -> Application:
    """The application of one deployment."""
    edge = spec.config.edge
    supervisor = DeploymentActorConfig(
        name=SUPERVISOR,
        actor_class="actors.remote_supervisor:SupervisorCls",
        init_args=(spec.to_text(),),
        actor_options=supervisor_options(),
    )
    deployment = serve.deployment(
        name="ingress",
        num_replicas=edge.num_replicas,
        max_ongoing_requests=edge.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=edge.drain_s,
        # Three in a row: one that froze is replaced within a minute, not within two.
        health_check_period_s=5.0,
        health_check_timeout_s=10.0,
        **_spreading(edge),
        deployment_actors=[supervisor],
        logging_config=LoggingConfig(enable_access_log=False),  # /metrics counts requests
    )
    return deployment(serve.ingress()(Ingress)).bind(spec)


def _spreading(edge: EdgeConfig) -> dict[str, Any]:
    """Old replicas answer until new ones, and their workers, are ready.

    All of them, but where new ones may have no room beside them: there one after the other leaves.
    """
    if edge.max_replicas_per_node is None:
        return {"max_surge_percent": 100}
    return {"max_surge_percent": 0, "max_replicas_per_node": edge.max_replicas_per_node}


def _print_without_traceback(*kinds: type[Exception]) -> None:
    """Errors that end this process uncaught are one line: they say all that a user can act on."""
    print_error = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, kinds):
            print(f"cannot start: {error}", file=sys.stderr)
        else:
            print_error(kind, error, traceback)

    sys.excepthook = hook


app = build
