"""P and D of the stories in processes of their own, each with a GPU where there are two."""

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from configs.schema import FloorsConfig, HandoffConfig
from engine.messages import ChannelKind
from load_tests.testbed.channel_ends import End, ReceivingProcess, SendingProcess
from tests.actors.kv_transfer.hashed_stories import Computed, DecodeSide, HostMover, Mover, Stories
from tests.actors.kv_transfer.hashed_worker import NUM_BLOCKS, HashedWorker, layout_of
from tests.actors.kv_transfer.two_processes import Sender, TwoProcesses, see_one_gpu
from tests.harness.forks import FORKS

HOST_PIECES = "host"  # besides the kinds of channels
# As slow as it may be: only that what arrives is right is asked here.
CONFIG = HandoffConfig(floors_gb_s=FloorsConfig(gloo_pair=0.001), transfer_deadline_s=60.0)


class ChannelMover:
    """Blocks over the channel that is open, with digests."""

    def __init__(self, process: SendingProcess) -> None:
        self._process = process

    async def move(self, from_ids: Sequence[int], to_ids: Sequence[int]) -> None:
        await self._process.hand_over(from_ids, to_ids)


class HashedProcesses(TwoProcesses):
    """D waits for what is asked of it; P tells the stories."""

    def __init__(self, folder: Path, model: Path, device: str) -> None:
        super().__init__(folder, device)
        self._model = model

    def tell(self, kind: str, num_trials: int, seed: int, within_s: float) -> set[Computed]:
        """`Stories.tell` over one kind of channel, or HOST_PIECES."""
        self._start(_decode, 1, str(self._model))
        answers = FORKS.Queue()
        process = self._start(_prefill, 0, str(self._model), kind, num_trials, seed, answers)
        return cast("set[Computed]", Sender(process, answers).wait(within_s))


@contextmanager
def two_hashed_workers(model: Path, device: str) -> Iterator[HashedProcesses]:
    with tempfile.TemporaryDirectory() as folder:
        processes = HashedProcesses(Path(folder), model, device)
        try:
            yield processes
        finally:
            processes.end()


def _new_end(folder: str, device: str, gpu: int, model: str) -> tuple[End, HashedWorker]:
    if device == "cuda":
        see_one_gpu(gpu)
    torch.set_num_threads(1)
    end = End(Path(folder), layout_of(Path(model), device), NUM_BLOCKS, CONFIG, device)
    worker = HashedWorker(Path(model), device, captures=gpu == 1)
    worker.use_store(end.store)
    worker.get_ready()
    return end, worker


def _decode(folder: str, device: str, gpu: int, model: str) -> None:
    end, worker = _new_end(folder, device, gpu, model)
    verbs = DecodeSide(worker, end.pieces).verbs
    asyncio.run(ReceivingProcess(end, Path(folder), verbs).serve())


def _prefill(
    folder: str,
    device: str,
    gpu: int,
    model: str,
    kind: str,
    num_trials: int,
    seed: int,
    answers: Any,
) -> None:
    async def main() -> set[Computed]:
        end, worker = _new_end(folder, device, gpu, model)
        process = SendingProcess(end, Path(folder))
        mover: Mover = HostMover(end.pieces, process.call)
        if kind != HOST_PIECES:
            await process.open(cast("ChannelKind", kind))
            mover = ChannelMover(process)
        stories = Stories(worker, process.call, mover, random.Random(seed))
        found = await stories.tell(num_trials)
        await process.close_channel()
        return found

    try:
        answers.put(asyncio.run(main()))
    except Exception as error:  # noqa: BLE001 - the test raises it
        answers.put(RuntimeError(f"{type(error).__name__}: {error}"))
