"""On which address the connections of this process listen."""

from ray.util import get_node_ip_address

from configs.schema import AppConfig


def listen_address(config: AppConfig) -> str:
    """The configured one, or this node's in its Ray cluster."""
    return config.handoff.address or str(get_node_ip_address())  # type: ignore[no-untyped-call]
