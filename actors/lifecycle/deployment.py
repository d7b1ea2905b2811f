"""What identifies a deployment, and how each of its actors is placed on Ray.

The identity is the config, the model's fingerprint and a hash of both, computed once where the
application is built and passed to every actor. The hash ends up in actor names
(`prefill-0.3fa9c1d2`), so that a redeploy with another config or model never talks to workers of
the old one. It leaves out what workers do not depend on, so that changing a limit at the ingress
does not reload a model. Name, namespace, resources and restarts of an actor are functions of the
config.
"""

import hashlib
import importlib.util
import math
import secrets
from pathlib import Path

import msgspec

from configs.schema import AppConfig
from engine.errors import ConfigError
from engine.kv.host.disk import kept_key
from engine.messages import Role

VERSION = "0.1.0"
SUPERVISOR = "supervisor"  # by this name Serve keeps it as an actor of the deployment
HASH_DIGITS = 8
BLOCK_KEY_BYTES = 32
EDGE_ONLY = ("name", "edge", "api", "tracing")
# Async actors serve many small calls and one long stream per ingress at a time.
MAX_CONCURRENCY = 10_000


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every actor gets at its creation."""

    config: AppConfig
    model: str  # fingerprint of the model folder; see `served_fingerprint`
    hash: str
    # Secret of the block hashes, the same in all workers, so that what they report can be compared.
    # Not part of the hash: workers that a redeploy keeps also keep theirs.
    block_key: bytes
    namespace: str = ""  # Ray namespace of all actors; known once the application runs
    # Ray's name of the supervisor's actor, the same after a restart. A redeploy that keeps workers
    # has another: then they wait for none (see `Lifeline`).
    supervisor: str = ""

    def in_application(self, app_name: str, supervisor: str = "") -> "DeploymentSpec":
        """Returns the spec for Serve application `app_name`; applications never share actors."""
        namespace = self.config.name or app_name
        return msgspec.structs.replace(self, namespace=namespace, supervisor=supervisor)

    def to_text(self) -> str:
        """As JSON: Serve shows what it gives its actors, and can show nothing else."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_text(text: str) -> "DeploymentSpec":
        return msgspec.json.decode(text, type=DeploymentSpec)


def describe_deployment(config: AppConfig) -> DeploymentSpec:
    """Read the model folder's identity (not its weights) and hash it with the config."""
    model, drafter = _model_fingerprint(Path(config.model.path)), _drafter_fingerprint(config)
    if config.speculation.drafter == "eagle3" or config.moves_draft_kv:
        model = f"{model} {drafter}"  # blocks hold what this folder's weights made
    _check_mask(config)
    sections = msgspec.to_builtins(config)
    for section in EDGE_ONLY:
        del sections[section]
    digest = hashlib.blake2b(
        msgspec.json.encode([VERSION, model, drafter, _mask_digest(config), sections]),
        digest_size=16,
    )
    return DeploymentSpec(
        config=config,
        model=model,
        hash=digest.hexdigest()[:HASH_DIGITS],
        block_key=_block_key(config, model),
    )


def served_fingerprint(spec: DeploymentSpec) -> str:
    """Of all that K and V depend on: the model, and its mask function as this machine has it.

    Workers with other ones take no blocks of each other, nor find each other's in a cache.
    """
    mask = spec.config.model.attention.mask
    return spec.model if mask is None else f"{spec.model} {mask} {_mask_digest(spec.config)}"


def _mask_source(config: AppConfig) -> Path | None:
    """The file of the module that `model.attention.mask` names; None = there is no such file."""
    module = (config.model.attention.mask or "").partition(":")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except ImportError:
        return None
    return None if found is None or found.origin is None else Path(found.origin)


def _check_mask(config: AppConfig) -> None:
    mask, source = config.model.attention.mask, _mask_source(config)
    if mask is not None and (source is None or not source.is_file()):
        raise ConfigError(
            f"model.attention.mask: {mask}: there is no such Python module here; put its folder on"
            " PYTHONPATH, on every machine, or correct the name"
        )


def _mask_digest(config: AppConfig) -> str:
    """Of the source of the mask's module; "" without a mask or a module."""
    source = _mask_source(config)
    if source is None or not source.is_file():
        return ""
    return hashlib.blake2b(source.read_bytes(), digest_size=16).hexdigest()


def _block_key(config: AppConfig, model: str) -> bytes:
    """Drawn, unless a disk tier keeps blocks for the next start with such blocks.

    It names the host tier's memory, too: deployments whose blocks have another layout must differ
    in it, or the workers of a new one could not start beside those of the old.
    """
    if config.cache.disk_path is None:
        return secrets.token_bytes(BLOCK_KEY_BYTES)
    kept = kept_key(Path(config.cache.disk_path))
    workers = config.workers
    ranks = {role: size for role, size in workers.num_ranks.items() if role != "decode"}
    # Of eagle3, and of a draft model whose K and V move, the model's name says it.
    layout = [ranks, workers.enable_dp_attention, config.speculation.drafter == "mtp"]
    asked = msgspec.json.encode([VERSION, model, config.model, config.cache, layout])
    return hashlib.blake2b(asked, key=kept, digest_size=BLOCK_KEY_BYTES).digest()


def _model_fingerprint(folder: Path) -> str:
    """Names, sizes and times of the folder's files, and the content of config.json."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _drafter_fingerprint(config: AppConfig) -> str:
    """Of the folder of what drafts; "" = it has none."""
    path = config.speculation.model_path
    if path is None:
        return ""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"speculation.model_path: {path} has no config.json; correct the path")
    return _model_fingerprint(Path(path))


def worker_names(config: AppConfig, deployment_hash: str) -> dict[str, Role]:
    """Returns the workers of a deployment, name -> role, in a stable order."""
    counts: list[tuple[Role, int]] = [
        ("unified", config.workers.unified),
        ("prefill", config.workers.prefill),
        ("decode", config.workers.decode),
    ]
    return {f"{role}-{i}.{deployment_hash}": role for role, count in counts for i in range(count)}


def rank_name(worker: str, rank: int) -> str:
    """Of the actor of a worker's further rank: `rank-1.decode-0.3fa9c1d2`.

    It does not begin like a worker's, because nobody but rank 0 may talk to it.
    """
    return f"rank-{rank}.{worker}"


def batcher_names(config: AppConfig, deployment_hash: str) -> list[str]:
    return [f"tokenizer-{i}.{deployment_hash}" for i in range(config.workers.tokenizer_batchers)]


def allocator_name(deployment_hash: str) -> str:
    return f"allocator.{deployment_hash}"


def rendezvous_name(deployment_hash: str) -> str:
    return f"rendezvous.{deployment_hash}"


def supervisor_options() -> dict[str, object]:
    """The Supervisor is a Serve deployment actor: Serve names, restarts and removes it."""
    return {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}


def service_options(spec: DeploymentSpec, name: str) -> dict[str, object]:
    """A detached helper actor without a model."""
    return {
        "name": name,
        "namespace": spec.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": MAX_CONCURRENCY,
    }


def worker_bundle(config: AppConfig) -> dict[str, float]:
    """Returns the resources of one rank of a worker, under Ray's names; empty if it asks for none.

    A worker takes as many such bundles as it has ranks, all on one node.
    """
    asked = {"CPU": config.workers.num_cpus, "GPU": config.workers.num_gpus}
    return {resource: amount for resource, amount in asked.items() if amount}


def rank_options(spec: DeploymentSpec, name: str) -> dict[str, object]:
    """A further rank of a worker: owned by rank 0, which never restarts it."""
    options = worker_options(spec, name) | {"max_restarts": 0}
    for key in ("lifetime", "get_if_exists"):
        del options[key]
    return options


def worker_options(spec: DeploymentSpec, name: str) -> dict[str, object]:
    """A detached worker with a model and its devices."""
    config = spec.config
    threads = str(config.workers.torch_threads)
    return service_options(spec, name) | {
        "num_cpus": config.workers.num_cpus,
        "num_gpus": config.workers.num_gpus,
        "runtime_env": {
            "env_vars": {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                # Channels handle a pair's failure, and gangs their own: NCCL's watchdog would end
                # the worker, and its monitor would poll the rendezvous.
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
                "TORCH_NCCL_ENABLE_MONITORING": "0",
                # A peer that dies while a communicator is made is waited for until then, 30 min by
                # default, and an abort waits as well.
                "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(
                    math.ceil(config.handoff.transfer_deadline_s)
                ),
            }
        },
    }
