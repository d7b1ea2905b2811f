"""A stored response is found at every replica of the ingress, and forgotten at all of them."""

import asyncio
import hashlib
import math
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


def with_two_replicas(
    use: Use, *, has_deaf: bool = False, has_dead: bool = False, is_complete: bool = True
) -> None:
    """Calls `use` with a client of each.

    The second one also knows a replica that does not answer (has_deaf) or one that has ended
    (has_dead), or not yet all of them (is_complete).
    """
    others = [OtherReplicas(), OtherReplicas()]
    others[1].complete_until_s = math.inf if is_complete else -math.inf
    apps = [edge_app(others=one) for one in others]
    third = CallServer(HOST, {})

    async def main(_: httpx.AsyncClient) -> None:
        replicas = [app.edge.responses for app in apps]
        first, second = [await replica.listen(HOST) for replica in replicas]
        others[0].addresses, others[1].addresses = [second], [first]
        if has_deaf or has_dead:
            others[1].addresses.insert(0, await third.address())
        if has_dead:
            await third.close()
        try:
            await use(client_of(apps[0]), client_of(apps[1]))
        finally:
            for end in (*replicas, third):
                await end.close()

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
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(first.id)

    with_two_replicas(use)


def test_a_replica_that_does_not_answer_makes_only_what_nobody_has_uncertain() -> None:
    async def use(here: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        first = await here.responses.create(input="one", max_output_tokens=3)
        assert await there.responses.retrieve(first.id) == first
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await there.responses.retrieve("resp_nobody")
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await there.responses.delete("resp_nobody")
        await there.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await here.responses.retrieve(first.id)

    with_two_replicas(use, has_deaf=True)


def test_a_replica_that_has_ended_has_nothing() -> None:
    async def use(_: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            await there.responses.retrieve("resp_nobody")

    with_two_replicas(use, has_dead=True)


def test_while_not_all_replicas_are_known_nothing_is_said_to_be_gone() -> None:
    async def use(here: openai.AsyncOpenAI, there: openai.AsyncOpenAI) -> None:
        first = await here.responses.create(input="one", max_output_tokens=3)
        with pytest.raises(openai.InternalServerError, match="not all known") as refused:
            await there.responses.delete("resp_nobody")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError, match="not all known"):
            await there.responses.create(input="x", previous_response_id="resp_nobody")
        assert await there.responses.retrieve(first.id) == first
        await there.responses.delete(first.id)

    with_two_replicas(use, is_complete=False)


def connections() -> list[asyncio.Task[object]]:
    """The tasks of this event loop's servers, one for each connection."""
    serve = "CallServer._serve"
    tasks = asyncio.all_tasks()
    return [one for one in tasks if getattr(one.get_coro(), "__qualname__", "") == serve]


def test_replicas_keep_one_connection_to_each_other() -> None:
    others = [OtherReplicas(), OtherReplicas()]
    apps = [edge_app(others=one) for one in others]

    async def main(_: httpx.AsyncClient) -> None:
        here, there = (app.edge.responses for app in apps)
        await here.listen(HOST)
        others[0].addresses = [await there.listen(HOST)]
        asked = [here.find_elsewhere("", f"resp_{number}") for number in range(20)]
        assert await asyncio.gather(*asked) == [None] * 20
        assert len(connections()) == 1
        await there.close()
        others[0].addresses = [await there.listen(HOST)]
        assert await here.find_elsewhere("", "resp_x") is None
        assert len(connections()) == 1
        kept = connections()
        await here.close()
        # No shorter: this process may stand still for seconds, and then the timer fires first.
        _, open_still = await asyncio.wait(kept, timeout=60)
        assert not open_still
        await there.close()

    apps[0].ask(main)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_response_is_of_the_key_that_made_it(is_elsewhere: bool) -> None:
    """Another key is told the very words that it is told of an id that nobody has."""
    keys = {"alice": "sk-a", "bob": "sk-b"}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    others = [OtherReplicas(), OtherReplicas()]
    apps = [edge_app({"api.keys": digests}, others=one) for one in others]
    at = apps[1 if is_elsewhere else 0]

    async def main(_: httpx.AsyncClient) -> None:
        for replica, other in zip(apps, reversed(others), strict=True):
            other.addresses = [await replica.edge.responses.listen(HOST)]
        made = await client_of(apps[0], keys["alice"]).responses.create(
            input="one", max_output_tokens=3
        )
        unknown, bob = "resp_" + "0" * (len(made.id) - 5), client_of(at, keys["bob"])

        async def refusals(response_id: str) -> list[object]:
            said: list[object] = []
            for ask in (
                lambda: bob.responses.retrieve(response_id),
                lambda: bob.responses.delete(response_id),
                lambda: bob.responses.create(input="x", previous_response_id=response_id),
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    await ask()
                said.append(refused.value.response.text.replace(response_id, "ID"))
            return said

        assert await refusals(made.id) == await refusals(unknown)
        alice = client_of(at, keys["alice"])
        assert await alice.responses.retrieve(made.id) == made
        await alice.responses.create(input="x", previous_response_id=made.id, max_output_tokens=3)
        await alice.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await alice.responses.retrieve(made.id)
        for app in apps:
            await app.edge.responses.close()

    apps[0].ask(main)


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
