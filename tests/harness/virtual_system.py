"""A whole application in one event loop on virtual time: an ingress, its workers, and deaths.

From the HTTP request to the engine's scheduler this is the product's code: routes, pipeline,
`Generations`, mailboxes, worker links and handles, engine hosts, token streams, both sides of the
handoff. There is no supervisor and no allocator: the harness restarts who was killed, and the
ingress places by itself, as it does while its allocator is away.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from actors.ingress.generation import Generations
from actors.lifecycle.deployment import DeploymentSpec
from actors.openai.protocol import child_seed
from actors.rpc.handles import AllocatorHandle, WorkerHandle
from actors.worker.engine_host import EngineHost
from configs.load import load_config
from engine.clock import ManualClock
from engine.errors import WorkerError
from engine.messages import LoadReport, Role, Submit, Topology
from engine.request import SamplingParams
from load_tests.testbed.holdings import worker_holdings
from tests.actors.ingress.edge_app import MODEL_FOLDER, edge_app
from tests.harness.asgi_client import ClientCall
from tests.harness.fakes import expected_output
from tests.harness.processes import Network, Process, own_tasks_by_process
from tests.harness.virtual_time import run_virtual
from tests.harness.virtual_worker import MAX_MODEL_LEN, Workshop

SUFFIX = ".virtual"  # of every worker's name, as a deployment's hash is
INGRESS = "ingress-virtual"
LOOK_S = 0.0005  # between two looks at what the workers do
PATIENCE_S = 120.0  # of virtual time
RESTART_S = 1.5  # of a worker that was killed

# Small blocks and steps: a prompt takes many steps, and its KV moves in many pieces.
CONFIG: dict[str, object] = {
    "model.path": str(MODEL_FOLDER),
    "cache.block_size": 4,
    "cache.num_blocks": 256,
    "scheduler.max_num_seqs": 4,
    "scheduler.max_num_batched_tokens": 16,
    "handoff.piece_bytes": 1,
    "handoff.transfer_deadline_s": 2.0,
    "lifetimes.acknowledge_every_s": 0.1,
    "workers.unified": 0,
}

Holdings = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A completion and how it is asked."""

    prompt: list[int]
    max_tokens: int
    seed: int = 0
    n: int = 1
    is_stream: bool = True

    @property
    def body(self) -> dict[str, object]:
        return {
            "model": "tiny",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "stream": self.is_stream,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def expected(self, choice: int = 0) -> list[int]:
        """The right tokens of a choice, by the oracle."""
        params = SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=True, seed=child_seed(self.seed, choice)
        )
        return expected_output(self.prompt, params, max_model_len=MAX_MODEL_LEN)[0]


class VirtualSystem:
    """An application whose workers can be killed; made inside the loop by `play`."""

    def __init__(
        self, overrides: Mapping[str, object], clock: ManualClock, rng: random.Random
    ) -> None:
        self._overrides = overrides
        self.config = config = load_config(None, overrides)
        self.allocator: Any = None  # None = away
        self.clock = clock
        self.rng = rng
        spec = DeploymentSpec(config=config, model="m", hash=SUFFIX[1:], block_key=bytes(32))
        self._network = Network(rng)
        self._workshop = Workshop(spec, self._network, clock)
        counts: dict[Role, int] = {
            "prefill": config.workers.prefill,
            "decode": config.workers.decode,
            "unified": config.workers.unified,
        }
        self._roles: dict[str, Role] = {
            f"{role}-{i}{SUFFIX}": role for role, count in counts.items() for i in range(count)
        }
        self._restarts: set[asyncio.Task[None]] = set()
        self._ingress = Process(INGRESS)
        self._edge = self._ingress.run(self._build_edge)
        self.generations: Generations = self._edge.edge.generations
        self.calls: list[tuple[Question, ClientCall]] = []
        self.num_deaths = 0

    def _build_edge(self) -> Any:
        async def find_allocator(name: str) -> AllocatorHandle:
            if self.allocator is None:
                raise WorkerError(f"{name} is away")
            return cast("AllocatorHandle", self.allocator)

        async def find(name: str) -> WorkerHandle:
            actor: Any = await self._network.find_actor(name, "")
            return WorkerHandle(name, actor)

        generations = Generations(
            self.config,
            ingress_id=INGRESS,
            find_worker=find,
            find_allocator=find_allocator,
            clock=self.clock,
        )
        return edge_app(dict(self._overrides), clock=self.clock, generations=generations)

    async def start(self) -> None:
        """Every worker has loaded, and the ingress reads its stream."""
        for name, role in self._roles.items():
            self._workshop.start(name, role)
        statuses = {name: self.host(name).heartbeat() for name in self._roles}
        topology = Topology(workers=statuses, roles=self._roles, batchers=[], allocator="allocator")
        self._ingress.run(lambda: self.generations.update(topology))
        await self.until(self.is_connected, "all workers are connected")

    @property
    def submitted(self) -> list[Submit]:
        """All that the ingress has sent to workers."""
        return self._network.submitted

    def workers(self, role: Role) -> list[str]:
        return [name for name, its_role in self._roles.items() if its_role == role]

    def names(self) -> list[str]:
        """Of the workers that live."""
        return [name for name, process in self._network.processes.items() if process.is_alive]

    def host(self, name: str) -> EngineHost:
        worker = self._network.processes[name].worker
        assert worker is not None
        return worker._host

    def load(self, name: str) -> LoadReport:
        """How busy a worker is."""
        return self.host(name).engine.load()

    def is_whole(self) -> bool:
        """Everybody lives, and is connected."""
        return not self._restarts and self.is_connected()

    def is_connected(self) -> bool:
        links = self.generations.links.links()
        return all(
            link.is_up and link.incarnation == self.host(link.name).incarnation for link in links
        )

    # ---- clients --------------------------------------------------------------------------------

    def ask(self, question: Question) -> ClientCall:
        call = self._ingress.run(
            lambda: ClientCall(self._edge.app, "/v1/completions", question.body)
        )
        self.calls.append((question, call))
        return call

    def prompt(self, num_tokens: int) -> list[int]:
        """One that nobody else has asked."""
        return [self.rng.randrange(1, 90) for _ in range(num_tokens)]

    # ---- deaths ---------------------------------------------------------------------------------

    async def kill(self, name: str, *, restart_s: float = RESTART_S) -> None:
        """Nothing of the process is left; another one has its name after a while."""
        self.num_deaths += 1
        role = self._roles[name]
        await self._network.processes[name].kill()

        async def restart() -> None:
            await asyncio.sleep(restart_s)
            self._workshop.start(name, role)

        task = asyncio.ensure_future(restart())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def freeze(self, name: str) -> None:
        """It stays so until it is killed."""
        self._network.processes[name].freeze()

    # ---- looking --------------------------------------------------------------------------------

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Let things happen until it is so; fails, saying what was awaited."""
        end_s = self.clock.now_s() + PATIENCE_S
        while not is_true():
            assert self.clock.now_s() < end_s, f"not within {PATIENCE_S} s: {what}"
            await asyncio.sleep(LOOK_S)

    async def holdings(self) -> Holdings:
        """How much of everything each worker and the ingress hold; books are checked first."""
        found: Holdings = {
            "ingress": {
                "open attempts": self.generations.num_open,
                "tasks": self._ingress.num_tasks,
            }
        }
        for name in self._roles:
            seen = await self.host(name).statistics()
            held = worker_holdings(seen, self.config.scheduler.max_num_seqs)
            held["tasks"] = self._network.processes[name].num_tasks
            found[name] = held
        return found

    async def rest(self) -> Holdings:
        """Once everybody lives and nothing was held for a while; the smallest counts of tasks."""
        await self.until(self.is_whole, "all live again")
        end_s = self.clock.now_s() + PATIENCE_S
        while any(_requests_of(await self.holdings())):
            assert self.clock.now_s() < end_s, f"still held: {await self.holdings()}"
            await asyncio.sleep(0.1)
        looks = []
        for _ in range(10):
            await asyncio.sleep(0.037)  # in step with nothing periodic
            looks.append(await self.holdings())
        return {
            who: {what: min(look[who][what] for look in looks) for what in looks[0][who]}
            for who in looks[0]
        }

    async def check_answers(self) -> None:
        """Every request that was not left got exactly the right tokens, or one clear error."""
        for question, call in self.calls:
            await call.wait()
            for choice in range(question.n):
                got, right = call.token_ids(choice), question.expected(choice)
                assert got == right[: len(got)], f"wrong tokens: {got}, not {right}"
            if call.task.cancelled() or not call.is_whole:
                continue  # who has left
            check_end(question, call)

    async def check_nothing_is_held(self, before: Holdings) -> None:
        """Some tasks end late: who cannot be told to forget a request is told again for a while."""
        end_s = self.clock.now_s() + PATIENCE_S
        while more := _beyond(await self.rest(), before):
            assert self.clock.now_s() < end_s, f"held now, and at the start: {more}"
        assert not self._workshop.problems, self._workshop.problems

    async def stop(self) -> None:
        for _, call in self.calls:
            await call.wait()
        await asyncio.gather(*self._restarts)
        await self.generations.close()
        for process in self._network.processes.values():
            await process.kill()
        await self._ingress.kill()


def check_end(question: Question, call: ClientCall) -> None:
    """A whole answer, or an error: as a status if no byte had come, else as the last event."""
    error = call.error
    if error is not None:
        assert error["message"], error
        assert not call.is_done
        assert (call.status == 200) == bool(call.events)
        return
    assert call.status == 200, call.body
    assert call.is_done == question.is_stream
    for choice in range(question.n):
        assert call.token_ids(choice) == question.expected(choice)


def _beyond(after: Holdings, before: Holdings) -> dict[str, tuple[int, int]]:
    """Who holds more of what."""
    return {
        f"{who}: {what}": (num, before[who][what])
        for who, held in after.items()
        for what, num in held.items()
        if num > before[who][what]
    }


def _requests_of(holdings: Holdings) -> list[int]:
    """What is held for requests: everything but tasks."""
    return [num for held in holdings.values() for what, num in held.items() if what != "tasks"]


def play(
    scenario: Callable[[VirtualSystem], Awaitable[None]], *, seed: int = 0, **overrides: object
) -> None:
    """Run a scenario; then answers are checked, and that nothing is held by anybody.

    `a__b=1` sets the config key a.b.
    """
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    clock = ManualClock(start_s=100.0)

    async def main() -> None:
        own_tasks_by_process(asyncio.get_running_loop())
        system = VirtualSystem(CONFIG | dotted, clock, random.Random(seed))
        with system._workshop.instead_of_a_cluster():
            await system.start()
            before = await system.rest()
            await scenario(system)
            await system.check_answers()
            await system.check_nothing_is_held(before)
            await system.stop()

    run_virtual(clock, main())
