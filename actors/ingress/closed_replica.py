"""Takes away the service by which other deployments would call a replica of Serve.

Every replica listens for such calls on every interface and unpickles what comes, before anybody has
shown a token: whoever reaches that port can run code. No setting of Serve closes it. Nothing of
ours is called that way: HAProxy speaks HTTP to a replica, and Serve's Python proxy and controller
make Ray's own calls, which ask for Ray's token.
"""

from ray.serve._private import replica

from engine.errors import ConfigError

REGISTER = "add_ASGIServiceServicer_to_server"


def close_call_port() -> None:
    """Leave the port of this process's replica without any service: calls are refused unread.

    Call it in the deployment's constructor, after which Serve opens the port. Raises ConfigError
    if Serve opens it in another way.
    """
    if not callable(getattr(replica, REGISTER, None)):
        raise ConfigError(
            f"ray.serve has no {REGISTER}: Ray 2.60 is expected; with another version, look at what"
            " a replica's port answers and adapt actors/ingress/closed_replica.py"
        )
    setattr(replica, REGISTER, _register_nothing)


def _register_nothing(servicer: object, server: object) -> None:
    """Stands in place of gRPC's generated function of the same arguments."""
