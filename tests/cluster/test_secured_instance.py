"""Who reaches a running application: keys, what Serve answers itself, and ports."""

import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from load_tests.testbed.deployed import PATIENCE_S, Application, Cluster

pytestmark = pytest.mark.ray

LOCALHOST = "127.0.0.1"
# Of Ray itself; the README says who may reach them.
DAEMONS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Part of a process's title -> how many ports it may listen on; on one of them Ray calls it.
ACTORS = {
    "PrefillWorker": 2,  # and for calls by connections, which ask for a secret
    "DecodeWorker": 2,
    "TokenizerBatcher": 2,
    "LapsAllocator": 2,
    "Rendezvous": 1,
    "Supervisor": 1,
    "ServeController": 1,
    "ServeReplica": 2,  # and for calls of the proxy
    "ProxyActor": 2,  # and HTTP
}


def status(
    application: Application, method: str, path: str, headers: Mapping[str, str] | None = None
) -> int:
    url = f"{application.url}{path}"
    return httpx.request(method, url, headers=headers, timeout=PATIENCE_S).status_code


def test_no_route_but_pages_and_health_answers_without_a_key(over_gloo_pairs: Application) -> None:
    headers = {"Authorization": f"Bearer {over_gloo_pairs.api_key}"}
    document = httpx.get(
        f"{over_gloo_pairs.url}/openapi.json", headers=headers, timeout=PATIENCE_S
    ).json()
    routes = [(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs]
    assert len(routes) > 10
    for method, path in [*routes, ("GET", "/unknown"), ("GET", "/docs"), ("GET", "/-/routes")]:
        expected = 200 if path in ("/", "/health", "/laps") else 401
        assert status(over_gloo_pairs, method, path) == expected, f"{method} {path}"
    assert status(over_gloo_pairs, "GET", "/v1/models", headers=headers) == 200
    assert status(over_gloo_pairs, "HEAD", "/health") == 200


def test_what_serve_answers_before_our_code_names_applications_and_nothing_else(
    cluster: Cluster, disaggregated: Application
) -> None:
    root = f"http://{LOCALHOST}:{cluster.port}/-"
    healthz = httpx.get(f"{root}/healthz", timeout=PATIENCE_S)
    assert (healthz.status_code, healthz.text) == (200, "success")
    routes = httpx.get(f"{root}/routes", timeout=PATIENCE_S)
    assert routes.json()[f"/{disaggregated.name}"] == disaggregated.name
    assert all(prefix == f"/{name}" for prefix, name in routes.json().items())
    for path in ("", "/", "/metrics", "/openapi.json", "/health"):
        assert httpx.get(f"{root}{path}", timeout=PATIENCE_S).status_code == 404, path


def listening_ports() -> dict[str, list[tuple[str, int]]]:
    """Title and pid of each process of Ray's actors here -> what it listens on."""
    listening: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            found = [
                (connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
        except psutil.NoSuchProcess:  # an idle process of Ray that has just ended
            continue
        if title.startswith("ray::") and not title.startswith(DAEMONS):
            listening[f"{title} ({process.pid})"] += found
    return listening


class Bait:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_replica_reads_nothing_that_comes_without_a_token(
    disaggregated: Application, tmp_path: Path
) -> None:
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(Bait(tmp_path / "taken")))
    codes = []
    for title, ports in listening_ports().items():
        for _, port in ports if "ServeReplica" in title else ():
            with grpc.insecure_channel(f"{LOCALHOST}:{port}") as channel:
                try:
                    ASGIServiceStub(channel).HandleRequest(request, timeout=PATIENCE_S)
                except grpc.RpcError as error:
                    codes.append(error.code())
    assert grpc.StatusCode.UNIMPLEMENTED in codes, "no replica has the port of Serve's calls"
    assert not (tmp_path / "taken").exists()


def test_actors_listen_where_they_are_called_and_serve_on_its_port_alone(
    cluster: Cluster, disaggregated: Application
) -> None:
    listening = listening_ports()
    assert len(listening) >= len(ACTORS), f"not all actors were found: {list(listening)}"
    for title, ports in listening.items():
        limit = next((limit for part, limit in ACTORS.items() if part in title), 1)
        assert len(ports) <= limit, f"{title} listens on {ports}"
    http = [
        (ip, port) for ports in listening.values() for ip, port in ports if port == cluster.port
    ]
    assert http == [(LOCALHOST, cluster.port)], "HTTP is for this machine, unless said otherwise"
