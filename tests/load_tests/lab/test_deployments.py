"""Deployments that are measured side by side: how they start, who routes, what is left of them."""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from configs.load import load_config
from engine.cost_model import PRIOR
from load_tests.http_load.client import LoadError
from load_tests.lab import bench_deployments, mixed_sweep
from load_tests.lab.bench_deployments import Bench, build_parser
from load_tests.lab.deployments import Deployment, Place, router_command, server_commands
from load_tests.lab.mixed_http import Asking, HttpClients
from load_tests.lab.server_process import ROOT, ServerCommand, ServerProcess, end_all
from load_tests.mixed_load import WARM_UP_SEED, MixedLoad, OverloadError, Served
from tests.load_tests.http_load.fake_openai import FakeOpenAI, Reply, running

MODEL = ROOT / "demo_model" / "laps-demo"
# Found as vLLM's server; what it was started with is the first line of its log.
FAKE_SERVER = """
    import argparse, asyncio, json, sys
    from tests.load_tests.http_load.fake_openai import FakeOpenAI
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--pages", type=json.loads, default={})
    args, rest = parser.parse_known_args()
    print(json.dumps(rest), flush=True)
    fake = FakeOpenAI(pages=args.pages)
    async def main():
        server = await asyncio.start_server(fake.answer, "127.0.0.1", args.port)
        async with server:
            await server.serve_forever()
    asyncio.run(main())
"""


def free_ports(num: int) -> int:
    """The first of so many ports on which nothing listens."""
    while True:
        first = random.randrange(20_000, 30_000 - num)
        with ExitStack() as stack:
            try:
                for port in range(first, first + num):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def place_in(folder: Path, **changes: object) -> Place:
    values: dict[str, object] = {
        "index": 1,
        "first_port": 8000,
        "folder": folder,
        "model": MODEL,
        "gpus": [4, 5, 6, 7],
        "num_blocks": 100,
        "overrides": {"model.weights": "random"},
        "vllm_path": Path("/opt/vllm"),
    }
    return Place(**(values | changes))  # type: ignore[arg-type]


# ---- what is started -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4u", Deployment(name="4u", unified=4)),
        ("3p1d:60,88.5", Deployment(name="3p1d", prefill=3, decode=1, rates=(60.0, 88.5))),
        ("12vllm", Deployment(name="12vllm", vllm=12)),
        ("2u@4:9", Deployment(name="2u@4", unified=2, ranks=4, rates=(9.0,))),
    ],
)
def test_a_name_says_how_many_workers_of_each_role(text: str, expected: Deployment) -> None:
    assert Deployment.parse(text) == expected


@pytest.mark.parametrize("text", ["", "u", "0u", "4x", "2p", "4u:fast", "4U", "2u@3", "@2"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        Deployment.parse(text)


def test_an_application_sees_its_gpus_and_none_of_another_cluster(tmp_path: Path) -> None:
    [split] = server_commands(Deployment.parse("1p2d"), place_in(tmp_path))
    assert split.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert split.environment["RAY_TMPDIR"] == str(tmp_path)
    assert split.url == "http://127.0.0.1:8010"
    # As a person starts it: from a deploy file it would be behind Serve's Python proxy.
    settings = tmp_path / "h200_2p2d.yaml"
    wanted = ["serve_app:build", f"config={settings}", f"model={MODEL}", "host=127.0.0.1"]
    assert split.words[-5:] == [*wanted, "port=8010"]
    written = settings.read_text()
    for line in ("prefill: 1", "decode: 2", "unified: 0", "num_blocks: 100", "weights: random"):
        assert f"  {line}\n" in written
    [other] = server_commands(Deployment.parse("1u"), place_in(tmp_path, index=2))
    first = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"
    last = "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"
    assert int(split.environment[last]) < int(other.environment[first])
    elsewhere = place_in(tmp_path, index=0, first_replica_port=62_000)
    [meanwhile] = server_commands(Deployment.parse("1u"), elsewhere)
    assert meanwhile.environment[first] == "62000"
    with pytest.raises(ValueError, match="2p3d needs 5 GPUs"):
        server_commands(Deployment.parse("2p3d"), place_in(tmp_path))


def test_without_gpus_workers_compute_on_the_processor(tmp_path: Path) -> None:
    [command] = server_commands(Deployment.parse("1u"), place_in(tmp_path, gpus=[]))
    assert "CUDA_VISIBLE_DEVICES" not in command.environment
    config = load_config(tmp_path / "h200_unified_x4.yaml", {})
    assert (config.model.device, config.workers.num_gpus) == ("cpu", 0)


def test_workers_of_several_ranks_have_as_many_gpus_each(tmp_path: Path) -> None:
    [gangs] = server_commands(Deployment.parse("2u@2"), place_in(tmp_path))
    assert gangs.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    config = load_config(tmp_path / "h200_tp2.yaml", {})
    assert (config.workers.unified, config.workers.tensor_parallel_size) == (2, 2)
    first, second, _ = server_commands(Deployment.parse("2vllm@2"), place_in(tmp_path))
    [whole, _] = server_commands(Deployment.parse("1vllm"), place_in(tmp_path))
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert first.words[first.words.index("--tensor-parallel-size") + 1] == "2"
    kv_bytes = [
        int(one.words[one.words.index("--kv-cache-memory-bytes") + 1]) for one in (first, whole)
    ]
    assert kv_bytes[0] * 2 == kv_bytes[1]  # of a GPU
    with pytest.raises(ValueError, match="3u@2 needs 6 GPUs"):
        server_commands(Deployment.parse("3u@2"), place_in(tmp_path))


def test_vllm_has_a_gpu_a_server_and_as_much_kv_as_ours(tmp_path: Path) -> None:
    *servers, router = server_commands(Deployment.parse("2vllm"), place_in(tmp_path))
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in servers] == ["4", "5"]
    assert len({one.environment["VLLM_CACHE_ROOT"] for one in servers}) == 2
    assert servers[0].environment["PYTHONPATH"].startswith(f"/opt/vllm:{ROOT}")
    config = json.loads((MODEL / "config.json").read_text())
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
    token_bytes *= config["head_dim"]
    words = list(servers[0].words)
    assert words[words.index("--load-format") + 1] == "dummy"
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(1600 * token_bytes)
    read = place_in(tmp_path, num_blocks=None, overrides={"model.weights": "safetensors"})
    alone, _ = server_commands(Deployment.parse("1vllm"), read)
    assert alone.words[alone.words.index("--load-format") + 1] == "auto"
    assert "--kv-cache-memory-bytes" not in alone.words
    assert (servers[0].port, servers[1].port, router.port) == (8011, 8012, 8010)


# ---- a server's life -----------------------------------------------------------------------------


def script(text: str, port: int) -> ServerCommand:
    words = [sys.executable, "-c", textwrap.dedent(text)]
    return ServerCommand(name="it", words=words, port=port, ready_path="/health")


def test_a_server_that_ends_at_its_start_shows_why(tmp_path: Path) -> None:
    process = ServerProcess(script("raise SystemExit('no GPU')", free_ports(1)), tmp_path / "log")
    with pytest.raises(LoadError, match="it ended with 1; the end of its log:\nno GPU"):
        process.wait_ready(time.monotonic() + 60)
    process.end()


def test_a_server_is_interrupted_once_and_killed_with_what_it_started(tmp_path: Path) -> None:
    text = f"""
        import pathlib, signal, subprocess, sys, time
        count = pathlib.Path({str(tmp_path / "count")!r})
        def note(number, frame):
            with count.open("a") as file:
                file.write("x")
        signal.signal(signal.SIGINT, note)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print(child.pid, flush=True)
        while True:
            time.sleep(1000)
    """
    log = tmp_path / "log"
    process = ServerProcess(script(text, free_ports(1)), log)
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    process.ask_to_end()
    while not (tmp_path / "count").exists():
        time.sleep(0.01)
    end_all([process], patience_s=0.0)
    assert (tmp_path / "count").read_text() == "x"
    child = Path("/proc") / log.read_text().strip() / "stat"
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.01)


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with running(FakeOpenAI()) as fake, pytest.raises(LoadError, match="answers at"):
        ServerProcess(script("", int(fake.url.rpartition(":")[2])), tmp_path / "log")


# ---- the router ----------------------------------------------------------------------------------


def test_the_router_sends_a_request_to_the_server_with_the_fewest(tmp_path: Path) -> None:
    is_free = threading.Event()
    held = FakeOpenAI(script=lambda number, body: Reply(waits_for=is_free.is_set))
    body = {"model": "fake", "prompt": [1], "max_tokens": 1, "stream": True}
    with running(held), running(FakeOpenAI()) as quick, ExitStack() as stack:
        servers = [held, quick]
        ports = [int(one.url.rpartition(":")[2]) for one in servers]
        router = ServerProcess(router_command(tmp_path, ports, free_ports(1)), tmp_path / "log")
        stack.callback(router.end)
        stack.callback(is_free.set)
        router.wait_ready(time.monotonic() + 60)
        url = f"{router.command.url}/v1/completions"
        client = stack.enter_context(httpx.Client(timeout=60))
        while not held.seen:  # one request stays there, and then every other one goes elsewhere
            asking = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body})
            asking.start()
            stack.callback(asking.join)
            held_or_answered(held, asking)
        before = len(quick.seen)
        for _ in range(5):
            assert client.post(url, json=body).status_code == 200
        assert (len(held.seen), len(quick.seen)) == (1, before + 5)
        is_free.set()


def held_or_answered(held: FakeOpenAI, asking: threading.Thread) -> None:
    while asking.is_alive() and not held.seen:
        asking.join(0.01)


# ---- the bench -----------------------------------------------------------------------------------


@pytest.fixture
def vllm_path(tmp_path: Path) -> Path:
    """A package in vLLM's place."""
    server = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(textwrap.dedent(FAKE_SERVER))
    about = tmp_path / "site" / "vllm-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Name: vllm\nVersion: 0.0.1\n")
    return tmp_path / "site"


@pytest.fixture
def like_ours(monkeypatch: pytest.MonkeyPatch, vllm_path: Path) -> None:
    """A server that is quickly there in place of an application; 3p1d does not start."""
    status = {
        "enabled": False,
        "threshold": 256,
        "policy": "ratio",
        "pools": {},
        "pending": {},
        "workers": [],
        "moves": [],
        "step_costs": {name: getattr(PRIOR, name) for name in PRIOR.__struct_fields__},
    }
    pages = json.dumps({"/laps_status": status})

    def commands(deployment: Deployment, place: Place) -> list[ServerCommand]:
        if deployment.is_vllm:
            return server_commands(deployment, place)
        program = str(vllm_path / "vllm" / "entrypoints" / "openai" / "api_server.py")
        words = [sys.executable, program, "--port", str(place.port), "--pages", pages]
        words = [sys.executable, "-c", "1 / 0"] if deployment.name == "3p1d" else words
        environment = {"PYTHONPATH": str(ROOT)}
        return [
            ServerCommand(
                name="ours",
                words=words,
                port=place.port,
                ready_path="/health",
                environment=environment,
            )
        ]

    monkeypatch.setattr(bench_deployments, "server_commands", commands)


@pytest.fixture
def switches(tmp_path: Path, vllm_path: Path) -> list[str]:
    return [
        *("--model", str(MODEL), "--gpus", "--num-blocks", "64", "--port", str(free_ports(40))),
        *("--rates", "20", "--duration-s", "0.2", "--warm-up-s", "0.2", "--shrink", "64"),
        *("--output-tokens", "2", "--limits", "60000,60000,60000"),
        *("--json", str(tmp_path / "out.json"), "--logs", str(tmp_path / "logs")),
        *("--vllm-path", str(vllm_path)),
    ]


@pytest.mark.usefixtures("like_ours")
def test_all_that_start_are_measured_and_each_figure_is_told_at_once(
    switches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = build_parser().parse_args(["3p1d", "2vllm", "1u:10,30", *switches, "--at-once", "2"])
    bench = Bench(args)
    bench.run()
    lines = [
        json.loads(line.removeprefix("RESULT ")) for line in capsys.readouterr().out.splitlines()
    ]
    assert [(line["variant"], line["rate"]) for line in lines] == [
        ("2vllm", 20.0),
        ("1u", 10.0),
        ("1u", 30.0),
    ]
    assert all(line["share_within_limits"] == 1.0 for line in lines)
    written = json.loads((tmp_path / "out.json").read_text())
    assert "ZeroDivisionError" in written["about"]["failed, 3p1d"]
    assert (written["about"]["vllm"], written["about"]["ray"]) == ("0.0.1", version("ray"))
    assert written["step_costs_by_rate"]["1u"].keys() == {"10.0", "30.0"}
    assert written["about"]["deployment, 1u"]["overrides"]["workers.unified"] == 1
    told = json.loads((tmp_path / "logs" / "2vllm, vLLM server 1.log").read_text().splitlines()[0])
    assert told[told.index("--scheduling-policy") + 1] == "priority"


@pytest.mark.usefixtures("like_ours")
def test_a_bench_that_measured_nothing_fails(
    switches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "3p1d", *switches])
    monkeypatch.setattr(bench_deployments, "exit_on_sigterm", lambda: None)
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench_deployments.main()


@pytest.mark.usefixtures("like_ours")
def test_searches_take_turns_until_the_time_is_over(
    switches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = build_parser().parse_args(["1u", "2u", *switches, "--at-once", "2", "--search"])
    bench = Bench(args)
    allowed = iter([True] * 6)  # the start, a rate of each, and three steps of searches
    monkeypatch.setattr(bench._budget, "allows", lambda what, seconds: next(allowed, False))
    # A pause of this machine of 50 ms would be a backlog that grows.
    monkeypatch.setattr(mixed_sweep, "is_good", lambda point, limits: True)
    bench.run()
    assert [(point.variant, point.rate) for point in bench.results.points] == [
        ("1u", 20.0),
        ("2u", 20.0),
        ("1u", 25.0),
        ("2u", 25.0),
        ("1u", 31.25),
    ]
    assert bench.results.best_rates == {"1u": 31.25, "2u": 25.0}
    assert bench.results.cut_searches == ["1u", "2u"]
    line = r"- 1u: 31\.2/s \([\d,]+ prompt tokens/s\) or more: the search was cut\n"
    assert re.search(line, bench.results.render())


@pytest.mark.usefixtures("like_ours")
def test_a_warm_up_that_is_refused_loses_no_deployment(
    switches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = HttpClients.serve

    def refuse_warm_up(
        self: HttpClients, url: str, load: MixedLoad, vocab_size: int, how: Asking
    ) -> list[Served]:
        if load.seed == WARM_UP_SEED:
            raise OverloadError("300 tokens are queued")
        return serve(self, url, load, vocab_size, how)

    monkeypatch.setattr(HttpClients, "serve", refuse_warm_up)
    bench = Bench(build_parser().parse_args(["1u", *switches]))
    bench.run()
    assert [(point.variant, point.rate) for point in bench.results.points] == [("1u", 20.0)]


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        (["--model", str(MODEL), "--search"], "--search needs --limits"),
        (["--model", str(MODEL), "--stride", "1"], "--stride 1: a search goes on by more than 1"),
        (["--model", "/nowhere"], "/nowhere/config.json: no such file"),
    ],
)
def test_wrong_switches_end_with_a_line(
    switches: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "1u", *switches])
    monkeypatch.setattr(bench_deployments, "exit_on_sigterm", lambda: None)
    with pytest.raises(SystemExit):
        bench_deployments.main()
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_bench_leaves_nothing_when_it_is_told_to_end(
    switches: list[str], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "load_tests.lab.bench_deployments", "1vllm", *switches]
    words += ["--duration-s", "1000", "--rates", "1"]
    bench = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None
    while "ready" not in bench.stderr.readline():
        assert bench.poll() is None
    bench.terminate()
    bench.communicate()
    assert bench.returncode == 128 + 15
    port = int(switches[switches.index("--port") + 1])
    for one in (port, port + 1):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", one))
