"""A stored response is found at every replica of the ingress, and forgotten at all of them."""

from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest

from actors.ingress.replica_exchange import OtherReplicas
from actors.rpc.server import CallServer
from tests.actors.ingress.edge_app import edge_app
from tests.actors.openai.clients import client_of

HOST = "127.0.0.1"
Use = Callable[[openai.AsyncOpenAI, openai.AsyncOpenAI], Awaitable[None]]


def with_two_replicas(use: Use, *, has_deaf: bool = False) -> None:
    """Calls `use` with a client of each. has_deaf: there is a third one that does not answer."""
    others = [OtherReplicas(), OtherReplicas()]
    apps = [edge_app(others=one) for one in others]

    async def main(_: httpx.AsyncClient) -> None:
        replicas = [app.edge.responses for app in apps]
        first, second = [await replica.listen(HOST) for replica in replicas]
        others[0].addresses, others[1].addresses = [second], [first]
        if has_deaf:
            gone = CallServer(HOST, {})
            others[1].addresses.insert(0, await gone.address())
            await gone.close()
        try:
            await use(client_of(apps[0]), client_of(apps[1]))
        finally:
            for replica in replicas:
                await replica.close()

    apps[0].ask(main)


def test_a_conversation_goes_on_at_another_replica() -> None:
    async def use(here: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        first = await here.responses.create(input="one", max_output_tokens=3)
        assert await there.responses.retrieve(first.id) == first
        second = await there.responses.create(
            input="two", previous_response_id=first.id, max_output_tokens=3
        )
        third = await here.responses.create(
            input="three", previous_response_id=second.id, max_output_tokens=3
        )
        alone = await here.responses.create(input="three", max_output_tokens=3)
        counts = [one.usage.input_tokens for one in (alone, second, third) if one.usage]
        assert counts == sorted(set(counts)), "each has what was said before it"

    with_two_replicas(use)


def test_what_is_deleted_at_one_replica_is_gone_at_all() -> None:
    async def use(here: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        first = await here.responses.create(input="one", max_output_tokens=3)
        await there.responses.delete(first.id)
        for client in (here, there):
            with pytest.raises(openai.NotFoundError, match="never stored"):
                await client.responses.create(input="x", previous_response_id=first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)

    with_two_replicas(use)


def test_a_replica_that_does_not_answer_makes_only_what_nobody_has_uncertain() -> None:
    async def use(here: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        first = await here.responses.create(input="one", max_output_tokens=3)
        assert await there.responses.retrieve(first.id) == first
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await there.responses.retrieve("resp_nobody")
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await there.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await here.responses.retrieve("resp_nobody")

    with_two_replicas(use, has_deaf=True)


@pytest.mark.parametrize("previous", ["resp_" + "x" * 300, "nothing", 7])
def test_what_is_no_id_is_refused_as_by_a_single_replica(previous: object) -> None:
    seen: list[tuple[int, object]] = []

    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(input="x", extra_body={"previous_response_id": previous})
        seen.append((refused.value.status_code, refused.value.body))

    async def use(_: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        await ask(there)

    with_two_replicas(use)
    single = edge_app()
    single.ask(lambda _: ask(client_of(single)))
    assert seen[0] == seen[1]
