"""The unified worker actor: a request enters, runs and finishes here."""

from actors.deployment import DeploymentSpec
from actors.worker.engine_host import EngineHost
from actors.worker.engine_worker import EngineWorker
from actors.worker.role_side import RoleSide
from engine.messages import Role


class UnifiedWorker(EngineWorker):
    """Prefills and decodes in one process; prompts ride along with decodes."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        super().__init__(EngineHost(spec, name, role, lambda host, engine: RoleSide()))
