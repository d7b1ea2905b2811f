"""What Serve keeps of a deployment can be shown as JSON, and is read back as it was."""

import json

from actors.lifecycle.deployment import DeploymentSpec, describe_deployment
from configs.load import load_config
from serve_app import bind

CHANGES = {"api.limits": {"*": {"requests_per_minute": 6}}, "handoff.floors_gb_s": {"gloo_pair": 1}}


def test_serve_can_show_the_arguments_of_the_supervisor() -> None:
    """`serve status` fails on any that are no JSON."""
    spec = describe_deployment(load_config(None, CHANGES))
    [supervisor] = bind(spec)._bound_deployment._deployment_config.deployment_actors
    shown = json.loads(json.dumps(supervisor.init_args))
    assert [DeploymentSpec.from_text(text) for text in shown] == [spec]
