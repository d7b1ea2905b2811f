"""A prefill and a decode worker on two Ray nodes of one host: rate of KV, and what kills cost.

    python -m load_tests.lab.two_nodes --kinds one addresses namespaces      # two GPUs
    python -m load_tests.lab.two_nodes --device cpu --kinds addresses        # gloo, tries the lab

For each kind of nodes (load_tests/testbed/ray_nodes.py) a cluster is started. First its nodes move
the KV of `--tokens` tokens of Qwen3-8B as in bench_channels.py, from processes that Ray started.
Then one worker prefills and one decodes, deterministic, with random weights on GPUs and the shipped
ones on a CPU. The configuration names `nccl_pair` on GPUs and `gloo_pair` on a CPU, so CUDA IPC is
not tried. Each worker is killed once, while streams decode and long prompts come; every answer is
compared token for token with that of an engine on one device. NCCL's own words say what it went
over. Exits with 1 if a token was wrong, an answer was lost, something is held at rest, or KV went
by another channel.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.lifecycle.placement_groups import worker_groups
from configs.load import load_config
from load_tests.lab.bench_channels import Outcome as Rate
from load_tests.lab.bench_channels import render as render_rates
from load_tests.lab.child_processes import exit_on_sigterm
from load_tests.lab.failure_stage import Ask
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.model_folder import write_model_folder
from load_tests.lab.soak_cases import Case
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, Cluster, free_port, wait_until
from load_tests.testbed.ray_nodes import KINDS, NUM_CPUS, NodeKind, RayNodes, ray_nodes
from load_tests.testbed.system import System

ROLES = ("prefill", "decode")
CHANNELS = {"cuda": "nccl_pair", "cpu": "gloo_pair"}
PATIENCE_S = 120.0
INSIDE_S = 240.0  # of one cluster
NUM_STREAMS, STREAM_PROMPT = 4, 24
NUM_PROMPTS, PROMPT_NEW = 2, 16
VOCABULARY = (10, 3000)  # ids of prompts
HEADER = ("killed", "answers whole", "wrong", "lost", "longest wait, s", "whole again, s", "held")
# What NCCL says of a connection: "Channel 00/1 : 0[0] -> 1[0] [send] via NET/Socket/0/Shared".
VIA = re.compile(r"via (\S+)")
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "{folder}/nccl.%h.%p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What clients saw of one kill."""

    role: str
    num_asks: int
    num_wrong: int
    num_lost: int
    longest_wait_s: float
    restored_s: float
    held: dict[str, int]

    @property
    def is_violation(self) -> bool:
        return bool(self.num_wrong or self.num_lost or self.held)

    def cells(self) -> tuple[str, ...]:
        num_whole = self.num_asks - self.num_wrong - self.num_lost
        held = ", ".join(f"{what} {num}" for what, num in self.held.items()) or "nothing"
        return (
            self.role,
            f"{num_whole} of {self.num_asks}",
            str(self.num_wrong),
            str(self.num_lost),
            f"{self.longest_wait_s:.1f}",
            f"{self.restored_s:.1f}",
            held,
        )


# ---- on the head node ----------------------------------------------------------------------------


def measure_inside(args: argparse.Namespace) -> bool:
    """Everything of one cluster, as a driver on its head node; returns whether all was right."""
    address = args.inside
    ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)
    num_nodes = 1 if args.kinds == ["one"] else 2
    wait_until(lambda: len(_nodes()) == num_nodes, f"{num_nodes} nodes are there", PATIENCE_S)
    say("the cluster is there")
    print(render_rates([measure_rate(args)]), flush=True)
    if args.no_kills:
        return True
    config = settings(args)
    cases = answer(args, config, draw_cases(args, random.Random(args.seed)))
    say(f"an engine alone has answered {len(cases)} requests")
    cluster = Cluster(port=free_port())
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": cluster.port})
    system = System(cluster, "two-nodes", config)
    wait_until(system.is_ready, "the application can serve", PATIENCE_S)
    say("the application can serve")
    places = {name: group.node_id for name, group in worker_groups(system.name).items()}
    assert len(set(places.values())) == num_nodes, f"workers are not apart: {places}"
    salts = (f"salt {i}" for i in itertools.count())
    check_all(system, cases, salts)
    killed = []
    for role in ROLES:
        killed.append(kill(system, role, cases, salts))
        say(f"{role} was killed: {killed[-1]}")
        check_all(system, cases, salts)
    num_others = _count(system, "prefill", "sender", "num_fallbacks")
    print(render_rows([HEADER, *(one.cells() for one in killed)]))
    print(f"channels of another kind than {CHANNELS[args.device]}: {num_others}", flush=True)
    return not num_others and not any(one.is_violation for one in killed)


def _nodes() -> list[str]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if node["Alive"]]


def say(text: str) -> None:
    print(f"[{time.monotonic():.0f} s] {text}", file=sys.stderr, flush=True)


def measure_rate(args: argparse.Namespace) -> Rate:
    """Of a handoff from the first node to the last, in processes that Ray started there."""
    folder = args.folder / "rate"
    folder.mkdir()
    nodes = _nodes()
    needs = {"num_gpus": 1} if args.device == "cuda" else {"num_cpus": 1}
    words = ["--device", args.device, "--channels", CHANNELS[args.device], "--seconds", "0"]
    words += ["--tokens", str(args.tokens), "--folder", str(folder)]
    ends = {}
    for worker, node in zip(("receive", "send"), (nodes[-1], nodes[0]), strict=True):
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options: dict[str, Any] = {**needs, "scheduling_strategy": where, "max_retries": 0}
        work = ray.remote(run_end).options(**options)
        ends[worker] = work.remote([*words, "--worker", worker], folder / "is_over")
    done, _ = ray.wait(list(ends.values()), num_returns=2, timeout=PATIENCE_S)
    found = folder / "outcomes.json"
    if not found.exists():
        raise RuntimeError(f"nothing was measured: {ray.get(done)}")
    [rate] = msgspec.json.decode(found.read_bytes(), type=list[Rate])
    return rate


def run_end(words: Sequence[str], is_over: Path) -> str:
    """Runs one end of bench_channels.py until either ends; returns the last of what it said.

    is_over: a file that whoever ends first makes.
    """
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    command = [sys.executable, "-m", "load_tests.lab.bench_channels", *words, "--address", address]
    with TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not is_over.exists():
                time.sleep(0.05)
        finally:
            is_over.touch()
            process.kill()
            process.wait()
        said.seek(0)
        return said.read()[-2000:]


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What the application is deployed with, by dotted keys."""
    found: dict[str, object] = {
        "workers.prefill": 1,
        "workers.decode": 1,
        "workers.num_cpus": NUM_CPUS,  # a node's, so that it has room for one
        "handoff.channel": CHANNELS[args.device],
        "handoff.address": None,
        "cache.num_blocks": 4 * args.tokens // 16 + 1024,
        "scheduler.max_num_batched_tokens": 2048,
    }
    if args.device == "cpu":
        return found
    shapes = {"num_hidden_layers": args.layers}
    model = args.folder / "qwen3-8b"
    if not model.exists():
        write_model_folder("qwen3-8b", args.folder, shapes)
    on_gpu = {"device": "cuda", "weights": "random", "path": str(model), "deterministic": True}
    found |= {f"model.{key}": value for key, value in on_gpu.items()}
    return found | {"workers.num_cpus": 1, "workers.num_gpus": 1}


def draw_cases(args: argparse.Namespace, rng: random.Random) -> list[Case]:
    """NUM_STREAMS short prompts with long answers, then NUM_PROMPTS the other way round."""

    def case(num_prompt_tokens: int, num_tokens: int) -> Case:
        ids = [rng.randrange(*VOCABULARY) for _ in range(num_prompt_tokens)]
        greedy = {"temperature": 0.0}
        return Case(prompt_ids=ids, text=None, sampling=greedy, num_tokens=num_tokens)

    streams = [case(STREAM_PROMPT, args.stream_tokens) for _ in range(NUM_STREAMS)]
    return streams + [case(args.prompt_tokens, PROMPT_NEW) for _ in range(NUM_PROMPTS)]


def answer(
    args: argparse.Namespace, config: dict[str, object], cases: Sequence[Case]
) -> list[Case]:
    """The cases, with what an engine on one device of the cluster answers."""
    needs = {"num_gpus": 1} if args.device == "cuda" else {"num_cpus": 1}
    unified = {"workers.prefill": 0, "workers.decode": 0, "workers.unified": 1}
    model = {"model.path": str(MODEL)}
    alone = ray.remote(answer_alone).options(**needs, max_retries=0)
    answers = ray.get(alone.remote(model | config | unified, cases), timeout=INSIDE_S)
    return [replace(case, expected=one) for case, one in zip(cases, answers, strict=True)]


def answer_alone(overrides: dict[str, object], cases: Sequence[Case]) -> list[list[int]]:
    engine = EngineInProcess(load_config(None, overrides))
    return [engine.generate([case.prompt_ids], case.num_tokens)[0] for case in cases]


def check_all(system: System, cases: Sequence[Case], salts: Iterator[str]) -> None:
    """All answers, asked at once. Raises AssertionError if one is not the engine's."""
    asks = [Ask(system, case, next(salts)) for case in cases]
    for ask in asks:
        ask.wait()
    assert all(ask.is_whole for ask in asks), [ask.view() for ask in asks]


def kill(system: System, role: str, cases: Sequence[Case], salts: Iterator[str]) -> Killed:
    """Kills a worker while all streams decode, and as soon as KV of the long prompts moves."""
    streams = [Ask(system, case, next(salts)) for case in cases[:NUM_STREAMS]]
    wait_until(lambda: all(len(ask.tokens) > 5 for ask in streams), "all stream", PATIENCE_S)
    [name] = system.application.workers(role)
    pid = system.pid(name)
    num_pieces = _count(system, "decode", "receiver", "num_pieces")
    prompts = [Ask(system, case, next(salts)) for case in cases[NUM_STREAMS:]]
    wait_until(lambda: _count(system, "decode", "receiver", "num_pieces") > num_pieces, "KV moves")
    began_s, at_s = time.monotonic(), time.perf_counter()
    system.application.actor(name).__ray_call__.remote(_end_at_once)
    asks = [*streams, *prompts]
    for ask in asks:
        ask.wait()
    wait_until(
        lambda: system.pid(name) not in (None, pid) and system.is_ready(), "whole", PATIENCE_S
    )
    restored_s = time.monotonic() - began_s
    until_s = time.monotonic() + PATIENCE_S / 4
    while (held := system.held()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return Killed(
        role=role,
        num_asks=len(asks),
        num_wrong=sum(not ask.is_right for ask in asks),
        num_lost=sum(ask.is_right and not ask.is_whole for ask in asks),
        longest_wait_s=max(ask.silence_s(at_s) or 0.0 for ask in asks),
        restored_s=restored_s,
        held=held,
    )


def _end_at_once(_: object) -> None:
    """In a worker's process, which may be in another namespace than whoever wants its end."""
    os.kill(os.getpid(), signal.SIGKILL)


def _count(system: System, role: str, part: str, key: str) -> int:
    seen: dict[str, dict[str, Any]] = system.statistics()
    return sum(int(one[part][key]) for name, one in seen.items() if name.startswith(role))


# ---- outside -------------------------------------------------------------------------------------


def measure(kind: NodeKind, args: argparse.Namespace) -> bool:
    """Starts the nodes, and the driver on the head; returns whether all was right."""
    has_gpus = args.device == "cuda"
    environment = dict(word.split("=", 1) for word in args.env)
    logged = LOGGED if has_gpus else {"OMP_NUM_THREADS": "1"}
    with ray_nodes(kind, has_gpus=has_gpus, environment=logged | environment) as cluster:
        words = [sys.executable, "-m", "load_tests.lab.two_nodes", *sys.argv[1:]]
        words += ["--kinds", kind, "--inside", cluster.gcs_address]
        words += ["--folder", str(cluster.folder)]
        if args.kills is not None and kind not in args.kills:
            words.append("--no-kills")
        try:
            done = subprocess.run(cluster.nodes[0].command(words), timeout=INSIDE_S, check=False)
        finally:
            print(f"NCCL went over: {transports(cluster)}", flush=True)
    return done.returncode == 0


def transports(cluster: RayNodes) -> str:
    """What NCCL wrote of its connections, each kind once."""
    logs = sorted(cluster.folder.glob("nccl.*"))
    found = {via for log in logs for via in VIA.findall(log.read_text(errors="replace"))}
    return ", ".join(sorted(found)) or f"nothing was said in {len(logs)} logs"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=sorted(CHANNELS), default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["one", "addresses"])
    parser.add_argument("--kills", nargs="*", choices=KINDS, help="kinds to kill workers of")
    parser.add_argument("--tokens", type=int, default=8192, help="of a handoff whose rate counts")
    parser.add_argument("--prompt-tokens", type=int, default=8000, help="of the long prompts")
    parser.add_argument("--stream-tokens", type=int, default=600, help="of the long answers")
    parser.add_argument("--layers", type=int, default=8, help="of Qwen3-8B's 36, for the kills")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="of the nodes")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-kills", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.inside:
        sys.exit(not measure_inside(args))
    exit_on_sigterm()
    is_right = True
    for kind in args.kinds:
        began_s = time.monotonic()
        print(f"\n## {kind}\n", flush=True)
        try:
            is_right &= measure(kind, args)
        except (RuntimeError, OSError, AssertionError) as error:
            print(f"not possible here: {error}", flush=True)
            is_right = False
        print(f"{time.monotonic() - began_s:.0f} s", flush=True)
    print(json.dumps(describe_machine()))
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
