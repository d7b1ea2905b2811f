"""Ways to compute one request on two workers, each of which must give the same bits.

P is in this process; D is asked by name, here or in another process (`Call`). Between them blocks
are moved by a channel, or as pieces in host memory.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from actors.kv_transfer.contracts import OutgoingData, PieceBytes, StagedPiece, StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from engine.kv.transfer import BlockWrite
from engine.messages import NotNow, PieceHeader, Refused, Reservation, ReserveRequest
from engine.request import RequestSpec, SamplingParams
from tests.actors.kv_transfer.hashed_worker import WATCHED, HashedWorker, Seen, Watched
from tests.harness.tiny_models import VOCAB_SIZE

PROMPT_TOKENS = (70, 150)  # of the watched request: at least, at most
OUTPUT_TOKENS = 34  # two block borders at least, so that it can lose its blocks twice
STORIES = (
    "handed over",
    "retracted, handed over",
    "migrated",
    "preempted",
    "handed over, preempted",
)

Call = Callable[..., Awaitable[Any]]


class Mover(Protocol):
    async def move(self, from_ids: Sequence[int], to_ids: Sequence[int]) -> None:
        """P's blocks into D's, verified."""
        ...


@dataclass(frozen=True)
class Computed:
    """The whole request, wherever its parts were computed; equal ones have equal bits."""

    tokens: tuple[int, ...]
    lines: tuple[str, ...]  # a hash of every line of logits it sampled from
    blocks: tuple[int, ...]  # digests of every full block of its KV, in the end


class DecodeSide:
    """D: what a story may ask of it, by name; arguments and answers cross a process boundary."""

    def __init__(self, worker: HashedWorker, pieces: KvPieces) -> None:
        self._worker = worker
        self._pieces = pieces
        self._reservation: Reservation | None = None
        self._write: BlockWrite | None = None

    @property
    def verbs(self) -> dict[str, Call]:
        return {
            "begin": self.begin,
            "steps": self.steps,
            "reserve": self.reserve,
            "grant": self.grant,
            "write": self.write,
            "arrived": self.arrived,
            "commit": self.commit,
            "continue": self.go_on,
            "finish": self.finish,
        }

    async def begin(self, prompt: list[int], params: SamplingParams, seed: int) -> None:
        self._worker.begin(Watched(prompt, params), seed)
        self._watched = Watched(prompt, params)

    async def steps(self, number: int) -> None:
        for _ in range(number):
            self._worker.step()

    async def reserve(self) -> tuple[int, int]:
        """Blocks found here, and blocks in all."""
        prompt = self._watched.prompt
        asked = ReserveRequest(
            spec=RequestSpec(params=self._watched.params),
            key=WATCHED,
            sender=self._worker.identity,
            ingress_id="test",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
        )
        answer: Reservation | NotNow | Refused = NotNow()
        while isinstance(answer, NotNow):
            answer = self._worker.incoming.reserve(asked)
            if isinstance(answer, NotNow):
                self._worker.step()
        assert isinstance(answer, Reservation), answer
        self._reservation = answer
        return answer.num_hit_blocks, answer.num_blocks

    async def grant(self, first: int, number: int) -> list[int]:
        """Blocks to write [first, first + number) of the request into."""
        self._write = self._worker.incoming.begin_write(self._header(first, number))
        self._pieces.fence()
        return self._write.block_ids

    async def write(self, block_ids: list[int], data: bytes, digests: list[int]) -> bool:
        """A piece in host memory."""
        buffer = self._pieces.empty(len(data))
        buffer[:] = np.frombuffer(data, dtype=np.uint8)
        return await self._pieces.write(block_ids, StagedPiece(data=buffer, digests=digests))

    async def arrived(self) -> None:
        assert self._write is not None, "nothing was granted"
        self._worker.incoming.end_write(WATCHED, self._write, is_verified=True)

    async def commit(self, num_blocks: int, first_token_id: int) -> None:
        self._worker.incoming.commit(self._header(num_blocks, 0, first_token_id))

    async def go_on(self, emitted: list[int]) -> None:
        """Compute the prompt and `emitted` again, and what follows."""
        self._worker.add_watched(emitted)

    async def finish(self, num_preemptions: int) -> Seen:
        """To the last token, losing all blocks so many times on the way."""
        for _ in range(num_preemptions):
            self._worker.run(1)
            self._worker.run_preempted()
        self._worker.run(self._watched.params.max_tokens)
        return self._worker.end(with_blocks=True)

    def _header(self, first: int, number: int, first_token_id: int | None = None) -> PieceHeader:
        assert self._reservation is not None, "nothing was reserved"
        identity = self._worker.identity
        return PieceHeader(
            transfer_id=self._reservation.transfer_id,
            key=WATCHED,
            sender=identity.name,
            sender_incarnation=identity.incarnation,
            epoch=1,
            seq=0,
            first_block=first,
            num_blocks=number,
            digests=[],
            first_token_id=first_token_id,
        )


class HostMover:
    """Pieces through host memory, whole, as the object store carries them."""

    def __init__(self, pieces: KvPieces, call: Call) -> None:
        self._pieces = pieces
        self._call = call

    async def move(self, from_ids: Sequence[int], to_ids: Sequence[int]) -> None:
        piece = await self._pieces.read(from_ids)
        data = await self._in_host_memory(piece.data)
        is_verified = await self._call("write", list(to_ids), data.tobytes(), piece.digests)
        assert is_verified, "wrong digests"

    async def _in_host_memory(self, data: OutgoingData) -> PieceBytes:
        return await self._pieces.to_host(data) if isinstance(data, StoredBlocks) else data


class Stories:
    """The same request again and again, with other neighbours, chunks and places each time."""

    def __init__(self, worker: HashedWorker, call: Call, mover: Mover, rng: random.Random) -> None:
        self._worker = worker
        self._call = call
        self._mover = mover
        self._rng = rng
        self._watched = draw_watched(rng)
        self.num_preemptions = 0
        self.num_forced = 0  # on D, of those that were to be

    async def tell(self, num_trials: int) -> set[Computed]:
        """What `num_trials` trials and the request alone on P made of it."""
        found = {self.alone()}
        for number in range(num_trials):
            found.add(await self._trial(STORIES[number % len(STORIES)]))
        # Who gives its blocks back is drawn with the neighbours: not the watched one each time.
        asked = sum(
            STORIES[number % len(STORIES)].endswith("preempted") for number in range(num_trials)
        )
        assert self.num_forced > 0 or asked < 4, f"of {asked} requests none lost its blocks on D"
        return found

    def alone(self) -> Computed:
        """Unified: the whole prompt as one chunk if it may be, and every token after it."""
        worker = self._worker
        worker.begin(self._watched, self._rng.randrange(2**60))
        worker.add_watched()
        worker.run(self._watched.params.max_tokens)
        return computed(worker.end(with_blocks=True))

    async def _trial(self, story: str) -> Computed:
        seed = self._rng.randrange(2**60)
        await self._call("begin", self._watched.prompt, self._watched.params, seed)
        is_retracted = story.startswith("retracted")
        # Then the prompt takes so many steps that each of those that grow needs a block meanwhile.
        step_tokens = 9 if is_retracted else None
        self._worker.begin(self._watched, seed + 1, max_num_batched_tokens=step_tokens)
        num_preemptions = 1 if story.endswith("preempted") else 0
        match story:
            case "migrated" | "preempted":
                first = await self._leave_after(self._rng.randrange(1, OUTPUT_TOKENS // 4))
            case _:
                first = await self._hand_over(is_retracted=is_retracted)
        last: Seen = await self._call("finish", num_preemptions)
        self.num_forced += min(last.num_preemptions, num_preemptions)
        self.num_preemptions += first.num_preemptions
        return computed(first, last)

    async def _leave_after(self, num_tokens: int) -> Seen:
        """So many tokens on P, then prompt and tokens go to D; where preempted, all of it."""
        self._worker.add_watched()
        self._worker.run(num_tokens)
        first = self._worker.end(with_blocks=False)
        await self._call("continue", first.tokens)
        return first

    async def _hand_over(self, *, is_retracted: bool) -> Seen:
        """The prompt on P, its blocks to D while and after it computes."""
        worker, rng = self._worker, self._rng
        if is_retracted:
            worker.add_growing(5)
        worker.add_watched(decode_worker="d", salt="own" if is_retracted else "")
        num_sent, num_blocks = await self._call("reserve")
        worker.outgoing.mark_reserved(WATCHED)
        while worker.ready is None:
            worker.step()
            if is_retracted and worker.is_computing:
                worker.squeeze_prompt()
            if rng.random() < 0.5:
                num_sent = await self._send(worker.shared, num_sent)
            await self._call("steps", rng.randrange(3))
        await self._send(worker.ready.block_ids, num_sent)
        await self._call("steps", rng.randrange(3))
        await self._call("commit", num_blocks, worker.ready.first_token_id)
        return worker.end(with_blocks=False)

    async def _send(self, block_ids: list[int], num_sent: int) -> int:
        """Blocks behind the first `num_sent`; how many D has now."""
        if len(block_ids) <= num_sent:
            return num_sent
        new_ids = block_ids[num_sent:]
        to_ids = await self._call("grant", num_sent, len(new_ids))
        await self._mover.move(new_ids, to_ids)
        await self._call("arrived")
        return len(block_ids)


def draw_watched(rng: random.Random) -> Watched:
    """Sampled with a seed of its own: a token that differs makes all that follow differ."""
    num_tokens = rng.randint(*PROMPT_TOKENS)
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS, temperature=1.0, seed=rng.randrange(2**60), ignore_eos=True
    )
    return Watched([rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)], params)


def computed(*parts: Seen) -> Computed:
    """Of parts one behind the other; the last worker has all of the KV."""
    return Computed(
        tokens=tuple(token for part in parts for token in part.tokens),
        lines=tuple(line for part in parts for line in part.lines),
        blocks=tuple(parts[-1].blocks),
    )
