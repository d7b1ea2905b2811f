"""What the host does in a whole turn of the step loop with drafts, where no model computes.

    python -m load_tests.lab.bench_turn
    python -m load_tests.lab.bench_turn --rows 16 64 --drafts 4 --drafters host device model
    python -m load_tests.lab.bench_turn --rows 256 --drafters device --profile

An engine on the CPU: scheduler, drafter, rows' tables, input arrays and results are real, and steps
overlap. Left out are the controller (`bench_scheduler --drafts` has it), what a GPU computes, and
the launches of the model's layers: a forward pass gives zeros, so every row samples the same token
everywhere, and all drafts are right. Lengths move on the device, as on a GPU; what torch does to
the small tensors that are left is in the figures. The processor's microseconds, of steps in which
every row has all drafts.

drafters: host = n-grams; device = n-grams that the device looks up, as `ngrams_on_device` says;
model = a small model, whose passes are launches, too, and part of the plan.
"""

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from configs.load import load_config
from engine.core import Executor, PendingStep
from engine.messages import encode
from engine.models.llama import ForwardResult
from engine.plan import StepPlan, StepResult
from engine.runner import row_texts
from engine.runner.forward_passes import ForwardPasses
from engine.runner.inputs import InputBatch
from kernels.attention.phased import Phases
from kernels.guessed_steps import RowStates, TextChanges
from load_tests.lab.bench_accepted import save_random_weights
from load_tests.lab.bench_scheduler import STEP_S, step_message
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES
from load_tests.tables import Figure, describe_machine, median_figure, render

DRAFTERS = {"host": "ngram", "device": "ngram", "model": "draft_model"}
PARTS = ("plan", "launch", "wait", "commit", "encode")
SAMPLED_ID = 0  # the first of equal logits
NUM_WARM_UP_STEPS = 8
NUM_PROMPT_TOKENS, BLOCK_SIZE = 128, 16
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


class Stopwatch:
    """Adds up the processor's time by the part of a turn that it was spent in."""

    def __init__(self) -> None:
        self.spent_us = dict.fromkeys(PARTS, 0.0)
        self._began_s = time.thread_time()

    def end(self, part: str) -> None:
        """What was spent since the last call belongs to `part`."""
        now_s = time.thread_time()
        self.spent_us[part] += 1e6 * (now_s - self._began_s)
        self._began_s = now_s

    def take(self) -> list[float]:
        """What was spent on each part since the last call."""
        spent_us, self.spent_us = list(self.spent_us.values()), dict.fromkeys(PARTS, 0.0)
        return spent_us


class TimedExecutor:
    """Times an executor's launches and waits, and says that each step took the same."""

    def __init__(self, executor: Executor, stopwatch: Stopwatch) -> None:
        self._executor = executor
        self.stopwatch = stopwatch

    def launch(self, plan: StepPlan) -> "_TimedStep":
        self.stopwatch.end("plan")
        pending = self._executor.launch(plan)
        self.stopwatch.end("launch")
        return _TimedStep(self, pending)


class _TimedStep:
    """A step of that executor."""

    def __init__(self, by: TimedExecutor, pending: PendingStep) -> None:
        self._by = by
        self._pending = pending

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        self._by.stopwatch.end("plan")  # also what follows a launch, before the wait
        result = self._pending.wait()
        self._by.stopwatch.end("wait")
        return msgspec.structs.replace(result, duration_s=STEP_S)


def _zeros(
    self: ForwardPasses,
    batch: InputBatch,
    last_tokens: Tensor,
    logit_indices: Tensor | None = None,
    *,
    checks_finite: bool = False,
    **_: object,
) -> ForwardResult:
    num_lines = batch.num_tokens if logit_indices is None else len(logit_indices)
    is_finite = torch.ones(batch.num_tokens, dtype=torch.bool) if checks_finite else None
    hidden = torch.zeros(num_lines, self.model.spec.hidden_size, dtype=self.model.dtype)
    return ForwardResult(hidden=hidden, is_finite=is_finite)


def _zeros_to_last(self: ForwardPasses, batch: InputBatch, last_tokens: Tensor) -> ForwardResult:
    hidden = torch.zeros(batch.num_rows, self.model.spec.hidden_size, dtype=self.model.dtype)
    return ForwardResult(hidden=hidden, is_finite=torch.ones(batch.num_tokens, dtype=torch.bool))


def _find(
    texts: Tensor,
    changes: TextChanges,
    states: RowStates,
    drafts: Tensor,
    *,
    min_match: int,
    max_match: int,
) -> None:
    drafts.fill_(SAMPLED_ID)


@contextmanager
def computing_nothing() -> Iterator[None]:
    """Engines built and stepped within have models that compute nothing."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(ForwardPasses, "forward", _zeros))
        stack.enter_context(patch.object(ForwardPasses, "forward_to_last", _zeros_to_last))
        stack.enter_context(patch.object(row_texts, "look_up", _find))
        stack.enter_context(patch.object(Phases, "reads_lengths_on_device", True))
        yield


def _write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-draft"] | _SMALL))
    save_random_weights(folder)
    return folder


class Bench:
    """An engine in which `num_rows` requests decode, and one step is in flight."""

    def __init__(
        self, folder: Path, drafter: str, *, num_rows: int, num_drafts: int, num_steps: int
    ) -> None:
        self._num_rows, self._num_drafts, self._num_steps = num_rows, num_drafts, num_steps
        num_new = (num_steps + NUM_WARM_UP_STEPS) * (1 + num_drafts)
        max_model_len = NUM_PROMPT_TOKENS + BLOCK_SIZE + num_new + 1
        num_row_blocks = max_model_len // BLOCK_SIZE + 2
        settings: dict[str, object] = {
            "model.path": str(folder),
            "model.device": "cpu",
            "model.max_model_len": max_model_len,
            "cache.block_size": BLOCK_SIZE,
            "cache.num_blocks": 2 * num_rows * num_row_blocks,
            "scheduler.max_num_batched_tokens": num_rows * (NUM_PROMPT_TOKENS + BLOCK_SIZE),
            "scheduler.max_num_seqs": num_rows,
            "scheduler.overlap": True,
            "speculation.drafter": DRAFTERS[drafter],
            "speculation.max_drafts": num_drafts,
            "speculation.adaptive": False,
        }
        if drafter == "model":
            settings["speculation.model_path"] = str(folder)
        else:
            settings["speculation.ngrams_on_device"] = drafter == "device"
        self._stopwatch = Stopwatch()
        self._ours = EngineInProcess(load_config(None, settings))
        self._ours.engine.core.wrap_executor(self._wrap)
        for i in range(num_rows):
            prompt = [3 + (i + j) % 50 for j in range(NUM_PROMPT_TOKENS + i % BLOCK_SIZE - 3)]
            self._ours.add(prompt + [SAMPLED_ID] * 3, num_new)

    def _wrap(self, executor: Executor) -> TimedExecutor:
        return TimedExecutor(executor, self._stopwatch)

    def run(self, profile: cProfile.Profile | None = None) -> list[list[float]]:
        """Microseconds of the parts of each step, after the warm-up and without older garbage."""
        for _ in range(NUM_WARM_UP_STEPS):
            self._step()
        gc.collect()
        with profile or nullcontext():
            steps_us = [parts for _ in range(self._num_steps) if (parts := self._step())]
        assert 2 * len(steps_us) > self._num_steps, f"{len(steps_us)} steps had all drafts"
        return steps_us

    def _step(self) -> list[float]:
        """The parts of the turns until a step is committed; [] unless all rows had drafts in it."""
        num_tokens = 0
        while num_tokens == 0:
            assert self._ours.engine.core.has_work, "all requests have ended"
            self._stopwatch.end("encode")
            output = self._ours.step()
            self._stopwatch.end("commit")
            num_tokens = len(output.tokens)
            counts = self._ours.engine.core.scheduler.statistics()
            encode(step_message([record for _, record in output.tokens], counts))
            self._stopwatch.end("encode")
        is_full = num_tokens == self._num_rows * (1 + self._num_drafts)
        parts_us = self._stopwatch.take()
        return parts_us if is_full else []


def figures(steps_us: list[list[float]], num_rows: int) -> list[Figure]:
    of_parts = zip(PARTS, zip(*steps_us, strict=True), strict=True)
    parts = [median_figure(name, part_us, "us/step") for name, part_us in of_parts]
    sums_us = [sum(step) for step in steps_us]
    a_row = median_figure("a row", [us / num_rows for us in sums_us], "us")
    return [*parts, median_figure("sum of these", sums_us, "us/step"), a_row]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--drafts", type=int, default=4, help="of each row in each step")
    parser.add_argument("--drafters", nargs="+", choices=sorted(DRAFTERS), default=["device"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="show which functions take the time")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch, computing_nothing():
        folder = _write_model(Path(scratch) / "small")
        for drafter in args.drafters:
            for num_rows in args.rows:
                given = {"num_rows": num_rows, "num_drafts": args.drafts, "num_steps": args.steps}
                bench = Bench(folder, drafter, **given)
                profile = cProfile.Profile() if args.profile else None
                steps_us = bench.run(profile)
                print(f"{num_rows} rows, {args.drafts} drafts of each, drafter: {drafter}")
                print(render(figures(steps_us, num_rows)), flush=True)
                if profile is not None:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()
