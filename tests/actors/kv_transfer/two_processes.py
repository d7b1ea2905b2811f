"""A receiver and a sender in processes of their own, which can be killed."""

import asyncio
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from configs.schema import FloorsConfig, HandoffConfig
from engine.kv.layout import KvLayout
from load_tests.testbed.channel_ends import End, ReceivingProcess, SendingProcess
from tests.harness.forks import FORKS

LAYOUT = KvLayout.with_heads(
    num_layers=12, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16"
)
NUM_BLOCKS = 300  # of 196,608 bytes
DEADLINE_S = 4.0
CONFIG = HandoffConfig(
    transfer_deadline_s=DEADLINE_S,
    piece_bytes=20 * LAYOUT.block_bytes,
    device_piece_bytes=200 * LAYOUT.block_bytes,
    pulled_piece_bytes=200 * LAYOUT.block_bytes,
    floors_gb_s=FloorsConfig(gloo_pair=0.001),
)


class TwoProcesses:
    """The processes of one test; `device` is "cpu" or "cuda"."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._device = device
        self._started: list[BaseProcess] = []

    def start_receiver(self) -> BaseProcess:
        (self._folder / "calls").unlink(missing_ok=True)
        return self._start(_receive, 1)

    def start_sender(self, scenario: str, *arguments: Any) -> "Sender":
        """Run `module:function(process, folder, *arguments)`, a coroutine function, there."""
        answers = FORKS.Queue()
        process = self._start(_send, 0, scenario, arguments, answers)
        return Sender(process, answers)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.join()

    def _start(self, target: Any, gpu: int, *arguments: Any) -> BaseProcess:
        process = FORKS.Process(
            target=target, args=(str(self._folder), self._device, gpu, *arguments), daemon=True
        )
        process.start()
        self._started.append(process)
        return process


class Sender:
    def __init__(self, process: BaseProcess, answers: Any) -> None:
        self.process = process
        self._answers = answers

    def wait(self, timeout_s: float = 120.0) -> Any:
        """What the scenario returned or put; an exception in it is raised here."""
        answer = self._answers.get(timeout=timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def two_processes(device: str) -> Iterator[TwoProcesses]:
    with tempfile.TemporaryDirectory() as folder:
        processes = TwoProcesses(Path(folder), device)
        try:
            yield processes
        finally:
            processes.end()


def see_one_gpu(index: int) -> None:
    """Of the GPUs that the tests may use, only this one, as Ray does it; before CUDA starts."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = given[index]


def _new_end(folder: str, device: str, gpu: int) -> End:
    if device == "cuda":
        see_one_gpu(gpu)
    return End(Path(folder), LAYOUT, NUM_BLOCKS, CONFIG, device)


def _receive(folder: str, device: str, gpu: int) -> None:
    end = _new_end(folder, device, gpu)
    asyncio.run(ReceivingProcess(end, Path(folder)).serve())


def _send(
    folder: str, device: str, gpu: int, scenario: str, arguments: tuple[Any, ...], answers: Any
) -> None:
    module, name = scenario.split(":")
    run = importlib.import_module(module).__dict__[name]

    async def main() -> Any:
        end = _new_end(folder, device, gpu)
        end.fill()
        process = SendingProcess(end, Path(folder))
        return await run(process, Path(folder), answers, *arguments)

    try:
        answers.put(asyncio.run(main()))
    except Exception as error:  # noqa: BLE001 - the test raises it
        answers.put(RuntimeError(f"{type(error).__name__}: {error}"))
