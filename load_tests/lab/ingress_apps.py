"""What the ingress benchmark serves: the application, with or without an engine, or plain FastAPI.

Runs one of them until its standard input closes; prints `serving` as soon as it can answer.
"""

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve

from actors.lifecycle.deployment import (
    MAX_CONCURRENCY,
    DeploymentSpec,
    describe_deployment,
    worker_names,
)
from actors.rpc.handles import create_actor
from configs.load import PROJECT_ROOT, load_config
from load_tests.lab.ingress_null import NullWorker
from serve_app import bind

NAME = "bench-ingress"
SERVING = "serving"
# A chunk as long as those of the application, with the demo model's name.
CHUNK = (
    b'data: {"id":"cmpl-40ae2f90674f4445ac13aa4a5ebe2ad2","created":1795240280,"model":"laps-demo",'
    b'"choices":[{"index":0,"text":" return","logprobs":null,"finish_reason":null}],'
    b'"object":"text_completion","system_fingerprint":null}\n\n'
)


def build_spec(overrides: dict[str, object]) -> DeploymentSpec:
    """One unified worker and one ingress replica with the demo model's tokenizer."""
    config = load_config(None, {"workers.unified": 1, "name": NAME} | overrides)
    path = str(PROJECT_ROOT / config.model.path)
    model = msgspec.structs.replace(config.model, path=path)
    return describe_deployment(msgspec.structs.replace(config, model=model))


def start_null_worker(spec: DeploymentSpec, step_s: float) -> None:
    """Under the name of the deployment's worker, so that its supervisor adopts it."""
    for name, role in worker_names(spec.config, spec.hash).items():
        options = {
            "name": name,
            "namespace": spec.config.name,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_concurrency": MAX_CONCURRENCY,
        }
        create_actor(ray.remote(NullWorker), options, spec, name, role, step_s)


def serve_application(port: int, host: str, overrides: dict[str, object], step_s: float) -> None:
    """On a Ray cluster of its own, which ends with this process; `step_s` 0 = a real engine."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": host, "port": port})
    spec = build_spec(overrides)
    if step_s:
        start_null_worker(spec, step_s)
    serve.run(bind(spec), name=NAME, route_prefix="/", blocking=False)
    print(SERVING, flush=True)
    sys.stdin.read()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


# ---- plain FastAPI ------------------------------------------------------------------------------


class Ticks:
    """Steps that all streams wait for together, as those of an engine."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self._tick.set()
            self._tick = asyncio.Event()

    async def wait(self) -> None:
        await self._tick.wait()


def plain_app(ticks: Ticks) -> FastAPI:
    """Nothing but a JSON body read and chunks written, one a step."""
    app = FastAPI(openapi_url=None)

    async def chunks(num_tokens: int) -> AsyncIterator[bytes]:
        for _ in range(num_tokens):
            await ticks.wait()
            yield CHUNK
        yield b"data: [DONE]\n\n"

    async def complete(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        return StreamingResponse(chunks(body["max_tokens"]), media_type="text/event-stream")

    app.add_api_route("/v1/completions", complete, methods=["POST"])
    return app


async def serve_plain(port: int, step_s: float) -> None:
    """One uvicorn process, as Serve's proxy starts it."""
    ticks = Ticks(step_s)
    config = uvicorn.Config(plain_app(ticks), access_log=False, log_level="warning")
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", port), backlog=config.backlog)
    # asyncio sets it only where a socket names its protocol; connections inherit it.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ticking = asyncio.create_task(ticks.run())
    serving = asyncio.create_task(server.serve([listening]))
    print(SERVING, flush=True)  # who connects now waits until it is accepted
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    ticking.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("application", "plain"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=2.0, help="0 = the demo model's engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=NUMBER")
    args = parser.parse_args()
    pairs = (item.partition("=") for item in args.set)
    overrides: dict[str, object] = {key: int(value) for key, _, value in pairs}
    if args.kind == "plain":
        asyncio.run(serve_plain(args.port, args.step_ms / 1e3))
    else:
        serve_application(args.port, args.host, overrides, args.step_ms / 1e3)


if __name__ == "__main__":
    main()
