"""What an ingress does while the supervisor is away."""

import asyncio

from actors.ingress.system_view import SystemView
from engine.errors import WorkerError
from engine.messages import Topology

TOPOLOGY = Topology(workers={}, roles={}, batchers=["tokenizer-0.x"], allocator="allocator.x")


def test_while_the_supervisor_is_away_its_last_word_counts_and_its_helpers_are_kept() -> None:
    async def main() -> None:
        heard: list[Topology] = []
        beaten: list[Topology] = []
        is_away = True

        async def ask() -> Topology:
            if is_away:
                raise WorkerError("the supervisor is not running")
            return TOPOLOGY

        async def beat(topology: Topology) -> None:
            beaten.append(topology)

        view = SystemView(ask, heard.append, set, beat)
        await view.refresh()
        assert (view.topology, heard, beaten) == (None, [], []), "nobody is known yet"
        is_away = False
        await view.refresh()
        assert (view.topology, beaten) == (TOPOLOGY, []), "the supervisor beats them itself"
        is_away = True
        await view.refresh()
        assert (view.topology, heard, beaten) == (TOPOLOGY, [TOPOLOGY], [TOPOLOGY])

    asyncio.run(main())
