"""The life of a request at an ingress whose workers die, refuse and hand over; without Ray."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal, cast

import pytest

from actors.ingress.generation import GenerationJob, Generations, new_request_id
from actors.rpc.handles import AllocatorHandle, WorkerHandle
from configs.schema import AppConfig
from engine.clock import MonotonicClock
from engine.errors import CapacityError, PoisonedError, WorkerError
from engine.messages import (
    Assign,
    FailureRecord,
    LoadReport,
    Placement,
    RouteRequest,
    StepMessage,
    Submit,
    TokenRecord,
    Topology,
    WorkerStatus,
)
from engine.request import RequestKey, RequestSpec, SamplingParams

NUM_TOKENS = 9
TURNS = 200  # of the event loop: more than anything here takes
LOAD = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=8, num_blocks=8)


def token_at(index: int) -> int:
    return 100 + index


class FakeWorker:
    """A unified worker whose every attempt is played by `play(worker, submit)`."""

    def __init__(self, name: str, play: Callable[["FakeWorker", Submit], None]) -> None:
        self.name = name
        self._play = play
        self._handoff_queue: asyncio.Queue[StepMessage | None] = asyncio.Queue()
        self._next_seq = 0
        self._num_lives = 1
        self.submits: list[Submit] = []
        self.dying: asyncio.Task[None] | None = None

    def say(self, tokens: list[TokenRecord], failures: list[FailureRecord]) -> None:
        message = StepMessage(
            worker=self.name,
            incarnation=str(self._num_lives),
            step_seq=self._next_seq,
            load=LOAD,
            tokens=tokens,
            failures=failures,
        )
        self._next_seq += 1
        self._handoff_queue.put_nowait(message)

    def emit(self, submit: Submit, num_tokens: int) -> None:
        """The request's next tokens, as few as are left."""
        first = len(submit.token_ids) - submit.num_prompt_tokens
        for index in range(first, min(first + num_tokens, NUM_TOKENS)):
            finish: Literal["length"] | None = "length" if index == NUM_TOKENS - 1 else None
            self.say(
                [TokenRecord(key=submit.key, index=index, token_id=token_at(index), finish=finish)],
                [],
            )

    async def die_later(self) -> None:
        """After the submit is answered, as a death by the request's own step is."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._handoff_queue.put_nowait(None)

    # ---- what an ingress calls

    async def submit(self, submit: Submit) -> None:
        self.submits.append(submit)
        self._play(self, submit)

    async def abort(self, key: RequestKey) -> None:
        pass

    async def acknowledge(self, ingress_id: str, step_seq: int) -> None:
        pass

    async def read(self, ingress_id: str) -> AsyncGenerator[StepMessage, None]:
        self.say([], [])
        while (message := await self._handoff_queue.get()) is not None:
            yield message
        self._num_lives += 1
        raise WorkerError(f"{self.name} died")


class FakeAllocator:
    """Always chooses the last worker, and counts the questions."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = workers
        self.num_asked = 0

    async def route(self, request: RouteRequest) -> Placement:
        self.num_asked += 1
        return Assign(prefill_worker=self._workers[-1], decode_worker=None, num_new_tokens=1)


async def _let_others_run() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def _connected(generations: Generations) -> None:
    for _ in range(TURNS):
        if all(link.is_up for link in generations.links.links()):
            return
        await asyncio.sleep(0)
    raise AssertionError("the workers are not connected")


def play(
    *scripts: Callable[[FakeWorker, Submit], None],
    scenario: Callable[[Generations, list[FakeWorker]], Awaitable[None]],
    has_allocator: bool = False,
) -> int:
    """Workers 0, 1, ... with a script each; all are connected when the scenario starts.

    Returns how often the allocator was asked.
    """

    async def main() -> int:
        workers = {f"unified-{i}": FakeWorker(f"unified-{i}", s) for i, s in enumerate(scripts)}
        allocator = FakeAllocator(list(workers))

        async def find_allocator(name: str) -> AllocatorHandle:
            if not has_allocator:
                raise WorkerError(f"{name} is away")
            return cast("AllocatorHandle", allocator)

        async def find(name: str) -> WorkerHandle:
            return cast("WorkerHandle", workers[name])

        generations = Generations(
            AppConfig(),
            ingress_id="ingress-0",
            find_worker=find,
            find_allocator=find_allocator,
            clock=MonotonicClock(),
        )
        status = WorkerStatus(identity=None, state="ready")
        generations.update(
            Topology(
                workers=dict.fromkeys(workers, status),
                roles=dict.fromkeys(workers, "unified"),
                batchers=[],
                allocator="allocator",
            )
        )
        async with asyncio.timeout(20):  # a hang is a failure, not a wait
            await _connected(generations)
            await scenario(generations, list(workers.values()))
            await generations.close()
        return allocator.num_asked

    return asyncio.run(main())


def build_choice(*, seed: int = 1) -> GenerationJob:
    return GenerationJob(
        spec=RequestSpec(
            params=SamplingParams(max_tokens=NUM_TOKENS, seed=seed),
            deadline_s=20.0,
        ),
        arrived_s=MonotonicClock().now_s(),
        request_id=new_request_id(),
        child=0,
        prompt_ids=[5, 6, 7],
        block_hashes=[],
    )


async def run(
    generations: Generations,
    job: GenerationJob,
    on_placed: Callable[[Assign], None] = lambda _: None,
) -> list[int]:
    async with aclosing(generations.run(job, on_placed)) as batches:
        return [record.token_id async for records in batches for record in records]


ALL = [token_at(index) for index in range(NUM_TOKENS)]


def dies_after(num_tokens: int) -> Callable[[FakeWorker, Submit], None]:
    def script(worker: FakeWorker, submit: Submit) -> None:
        worker.emit(submit, num_tokens)
        worker.dying = asyncio.ensure_future(worker.die_later())

    return script


def serves(worker: FakeWorker, submit: Submit) -> None:
    worker.emit(submit, NUM_TOKENS)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_request_that_ends_two_workers_is_not_tried_again(num_tokens: int) -> None:
    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        with pytest.raises(PoisonedError):
            await run(generations, build_choice())
        assert sum(len(worker.submits) for worker in workers) == 2
        with pytest.raises(PoisonedError):  # nor the same from another client
            await run(generations, build_choice(seed=random.randrange(99)))
        assert sum(len(worker.submits) for worker in workers) == 2

    play(*[dies_after(num_tokens)] * 4, scenario=scenario)


def test_a_first_token_is_read_before_the_tokens_of_others() -> None:
    read: list[tuple[str, int]] = []

    async def follow(generations: Generations, job: GenerationJob) -> None:
        async with aclosing(generations.run(job, lambda _: None)) as batches:
            async for records in batches:
                read.extend((job.request_id, record.index) for record in records)

    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        old, new = build_choice(), build_choice()
        tasks = [asyncio.create_task(follow(generations, job)) for job in (old, new)]
        await _let_others_run()
        assert len(workers[0].submits) == len(tasks)

        def record(job: GenerationJob, index: int) -> TokenRecord:
            key = RequestKey(job.request_id)
            return TokenRecord(key=key, index=index, token_id=token_at(index))

        workers[0].say([record(old, 0)], [])
        workers[0].say([record(old, 1), record(new, 0)], [])
        workers[0].say([record(old, 2), record(new, 1)], [])
        await _let_others_run()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        names = {old.request_id: "old", new.request_id: "new"}
        assert [(names[job], index) for job, index in read[:3]] == [
            ("old", 0),
            ("new", 0),
            ("old", 1),
        ]

    play(lambda worker, submit: None, scenario=scenario)


def test_a_neighbour_of_such_a_request_gets_every_token_once() -> None:
    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        placed: list[Assign] = []
        assert await run(generations, build_choice(), placed.append) == ALL
        assert len({assign.prefill_worker for assign in placed}) == 3, "one for each attempt"
        starts = [w.submits[0].token_ids[3:] for w in workers if w.submits]
        assert sorted(starts, key=len) == [[], ALL[:3], ALL[:6]]

    play(*[dies_after(3)] * 3, scenario=scenario)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_allocator_is_asked_where_there_is_a_choice(num_workers: int) -> None:
    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        assert await run(generations, build_choice()) == ALL
        assert [len(worker.submits) for worker in workers] == [0, 1][-num_workers:]

    num_asked = play(*[serves] * num_workers, scenario=scenario, has_allocator=True)
    assert num_asked == num_workers - 1


def test_requests_of_a_drained_worker_go_on_elsewhere_with_the_tokens_they_have() -> None:
    num_here = random.randrange(NUM_TOKENS)

    def is_drained(worker: FakeWorker, submit: Submit) -> None:
        if submit.key.attempt > 0:
            serves(worker, submit)
            return
        worker.emit(submit, num_here)
        failure = FailureRecord(key=submit.key, reason="drained", retryable=True)
        worker.say([], [failure])

    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        assert await run(generations, build_choice()) == ALL
        [again] = [s for w in workers for s in w.submits if s.key.attempt == 1]
        assert again.token_ids[3:] == ALL[:num_here]

    play(is_drained, is_drained, scenario=scenario)


def test_a_worker_that_drains_is_asked_again_when_there_is_no_other() -> None:
    def drains(worker: FakeWorker, submit: Submit) -> None:
        if submit.key.attempt == 0:
            raise CapacityError(f"{worker.name} is draining")
        serves(worker, submit)

    async def scenario(generations: Generations, workers: list[FakeWorker]) -> None:
        assert await run(generations, build_choice()) == ALL

    play(drains, scenario=scenario)
