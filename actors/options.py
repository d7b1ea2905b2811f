"""How each actor is placed on Ray: name, namespace, resources, restarts. Functions of the config.

Names read well in the Ray dashboard (`prefill-0.3fa9c1d2`) and end in the deployment's hash, so
that a redeploy with another config or model never talks to workers of the old one.
"""

import math

from actors.deployment import DeploymentSpec
from configs.schema import AppConfig
from engine.messages import Role

# Async actors serve many small calls and one long stream per ingress at a time.
MAX_CONCURRENCY = 10_000


def worker_names(config: AppConfig, deployment_hash: str) -> dict[str, Role]:
    """Every worker of a deployment: name -> role, in a stable order."""
    counts: list[tuple[Role, int]] = [
        ("unified", config.workers.unified),
        ("prefill", config.workers.prefill),
        ("decode", config.workers.decode),
    ]
    return {f"{role}-{i}.{deployment_hash}": role for role, count in counts for i in range(count)}


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
    """What one worker takes of a node, by Ray's names; empty when it asks for nothing."""
    asked = {"CPU": config.workers.num_cpus, "GPU": config.workers.num_gpus}
    return {resource: amount for resource, amount in asked.items() if amount}


def worker_options(spec: DeploymentSpec, name: str) -> dict[str, object]:
    """A detached worker with a model replica and its devices."""
    config = spec.config
    threads = str(config.workers.torch_threads)
    return service_options(spec, name) | {
        "num_cpus": config.workers.num_cpus,
        "num_gpus": config.workers.num_gpus,
        "runtime_env": {
            "env_vars": {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                # A pair's failure is ours to handle: NCCL's watchdog would end the worker, and its
                # monitor would poll the rendezvous.
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
