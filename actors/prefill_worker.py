"""The prefill worker actor: prompts are computed here, then their KV moves to a decode worker."""

from typing import TYPE_CHECKING

from actors.deployment import DeploymentSpec
from actors.worker.engine_host import EngineHost
from actors.worker.engine_worker import EngineWorker
from actors.worker.role_side import RoleSide
from engine.messages import Role

if TYPE_CHECKING:
    from engine.build import Engine


class PrefillWorker(EngineWorker):
    """Answers with the first token, and sends the KV on."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        super().__init__(EngineHost(spec, name, role, _make_side))


def _make_side(host: EngineHost, engine: "Engine") -> RoleSide:
    from actors.handoff.sides import SendingSide  # imports torch, which takes seconds

    return SendingSide(host, engine)
