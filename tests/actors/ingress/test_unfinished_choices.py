"""Choices whose tokens end without a finish, as no worker lets them: an error, and nobody waits."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from actors.ingress.generation import GenerationJob
from engine.messages import Assign, TokenRecord
from engine.request import RequestKey
from tests.actors.ingress.edge_app import ASSIGN, edge_app


async def one_token(
    job: GenerationJob, on_placed: Callable[[Assign], None], _: Callable[[], None]
) -> AsyncGenerator[list[TokenRecord], None]:
    on_placed(ASSIGN)
    yield [TokenRecord(key=RequestKey(job.request_id, job.child), index=0, token_id=100)]


@pytest.mark.timeout(30)
def test_several_choices_that_never_finish_are_an_error() -> None:
    app = edge_app()
    generations: Any = app.edge.generations
    generations.run = one_token

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "n": 2}
        return await client.post("/v1/completions", json=body)

    assert app.ask(send).status_code == 500
