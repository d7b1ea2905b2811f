"""What every rank does in the tests of a shared model and a shared engine.

Other processes import this file, which is why it leaves out what takes seconds: transformers.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from engine.errors import ConfigError, EngineError
from engine.layers.context import Comm
from engine.layers.linear import DenseLinear
from engine.layers.vocabulary import build_head
from engine.models.llama import CausalLM
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.models.weights import load_weights
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.runner.auto import Calibration, Limits, StepSizes
from engine.runner.calibration import Room, calibrate
from engine.runner.executor import Executor
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graph_sizes import ragged_sizes
from engine.runner.kv_memory import num_blocks_that_fit
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.trials import WHOLE, OverlapTrials
from engine.sampling.embeddings import Embeddings
from kernels.sampling.choices import GreedyChoice
from tests.engine.ranks.exact_models import SnappingSums, build_exact, planted, snapped_mixtures
from tests.engine.runner.graph_story import RerunRecorder
from tests.engine.runner.step_driver import GREEDY, StepDriver
from tests.harness.in_process import start_engine

NUM_TRIED_STEPS = 2
EVERY_STEP = OverlapRule(min_prompt_tokens=2, min_decode_rows=2)
DRAWN = SamplingParams(max_tokens=64, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)
EXCHANGED = WeightSource(sharing="exchanged")
GATHERED = WeightSource(sharing="gathered")
EXPERT_PARALLEL = WeightSource(sharing="experts")
SCORED = msgspec.structs.replace(GREEDY, prompt_logprobs=3, logprobs=2)


def exchanging(
    model: CausalLM, *, min_tokens: int, is_sequence_parallel: bool = False
) -> ExecutorOptions:
    """Steps of at least `min_tokens` tokens share them out between ranks, if the model can.

    is_sequence_parallel: a model without experts does so, too.
    """
    is_asked = is_sequence_parallel or model.spec.mixture is not None
    shares = is_asked and model.can_exchange
    return ExecutorOptions(min_exchanged_tokens=min_tokens if shares else None)


def tell(
    comm: Comm,
    folder: Path,
    fault: str | None = None,
    captures: bool = False,
    overlaps: bool = False,
    source: WeightSource = AS_PUBLISHED,
    fuses: bool = False,
    is_sequence_parallel: bool = False,
) -> list[Tensor | StepResult]:
    """Chunks, decode steps and both ways through the last layer; the same steps on every rank.

    fuses: sums over the ranks are taken with the norm after them. is_sequence_parallel: as of
    `exchanging`.
    """
    skips = patch("engine.runner.executor._MIN_TOKENS_TO_SKIP_QUERIES", 9)
    sums = SnappingSums(comm) if fuses else None
    with planted(fault), snapped_mixtures(), skips, patch.object(comm, "fused_sums", sums):
        model, attention = build_exact(folder, comm.rank, captures=captures, source=source)
        options = exchanging(model, min_tokens=2, is_sequence_parallel=is_sequence_parallel)
        driver = StepDriver(model, seed=1, phased=attention, options=options, comm=comm)
        if overlaps:
            driver.executor.overlap_two_batches(EVERY_STEP, threshold=0.48)
        if captures:
            sizes = ragged_sizes(8, 32)
            driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=sizes)
        if captures and overlaps:
            driver.executor.capture_split_decodes(RerunRecorder(), lambda _: None, min_rows=2)
        found: list[Tensor | StepResult] = []
        driver.admit(0, [5, 130, 7, 66, 9, 65, 0, 33, 98], params=GREEDY)
        driver.admit(1, list(range(20, 60)), params=DRAWN)
        driver.admit(2, list(range(100, 113)), params=SCORED)
        found += driver.logits({0: 4, 1: 6}).values()
        steps = [{0: 5, 2: 8, 1: 20}, {1: 1, 0: 1, 2: 5}, {0: 1, 1: 13, 2: 1}]
        steps += [{2: 1, 1: 1, 0: 1}] * 4
        for num_new in steps:  # the first is long enough for the last layer without its queries
            found.append(_untimed(driver.sample(num_new)))
        replayed = driver.executor.statistics().prompt_steps
        assert (replayed is not None and replayed.num_replayed > 0) == captures
        assert sums is None or sums.num_taken > 0
        split = driver.executor.statistics().two_batches
        assert (split is not None) == overlaps
        if split is not None:
            replayed_and_not = split.num_replayed, split.num_split_decodes
            assert replayed_and_not == ((4, 0) if captures else (0, 4))
            # What replays a graph with prompts is not split; here only scores do not.
            assert (split.num_two_chunk > 0) == (split.num_split_prompts > 0)
            assert split.num_split_prompts > 0
        driver.release(0)
        driver.admit(0, [4, 3, 2])
        found += driver.logits({0: 3}).values()
        return found


def try_overlap(comm: Comm, folder: Path, captures: bool) -> list[object]:
    """Lag and thresholds where every trial counts as a gain; then what the executor replays."""
    model, attention = build_exact(folder, comm.rank, captures=captures)
    executor = StepDriver(model, seed=1, phased=attention, comm=comm, num_blocks=80).executor
    executor.overlap_two_batches(WHOLE, threshold=0.48)
    if captures:
        executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=ragged_sizes(8, 32))
    said: list[str] = []
    room = Room(StepSizes(max_rows=8, max_tokens=64, max_graph_rows=8), 4, 80, 120)
    trials = OverlapTrials(executor, room, comm, said.append)
    with (
        patch("engine.runner.overlap.tuning.MIN_SPEEDUP", 0.0),
        patch("engine.runner.overlap.trials.MIN_DECODE_ROWS", 4),
        patch("engine.runner.overlap.trials.NUM_STEPS", NUM_TRIED_STEPS),
        patch("engine.runner.overlap.tuning.NUM_STEPS", NUM_TRIED_STEPS),
    ):
        capture = partial(_capture_halves, executor) if captures else None
        found: list[object] = [trials.decode_lag(capture)]
        if capture is not None:
            capture(4)
        found += [trials.min_prompt_tokens(32 if captures else 0), trials.min_decode_rows()]
    assert executor.two_batches.rule is WHOLE
    return [*found, len(said), executor.statistics().two_batches]


def _capture_halves(executor: Executor, min_rows: int) -> None:
    executor.capture_split_decodes(RerunRecorder(), lambda _: None, min_rows=min_rows)


def _untimed(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, duration_s=None)


def embed(comm: Comm, folder: Path) -> list[bytes]:
    model, attention = build_exact(folder, comm.rank)
    sampler = Embeddings(is_normalised=False)
    driver = StepDriver(model, seed=1, phased=attention, comm=comm, sampler=sampler)
    asks = SamplingParams(max_tokens=0, wants_embedding=True)
    for row, length in enumerate((3, 11)):
        driver.admit(row, range(20 * row, 20 * row + length), params=asks)
    driver.sample({1: 4})
    result = driver.sample({0: 3, 1: 7})
    return [result.embeddings[0], result.embeddings[1]]


def best_of_shared(comm: Comm, weight: Tensor, hidden: Tensor) -> tuple[Tensor, GreedyChoice]:
    """What a head of `weight` [vocab, n] gives: shared, and padded with what would be the best."""
    share = comm.rank.padded_share(len(weight))
    own = weight.new_full((comm.rank.padded_length(len(weight)), weight.shape[1]), 99.0)
    own[: share.stop - share.start] = weight[share]
    head = build_head(DenseLinear(own, None), len(weight), comm.rank)
    logits = head.own_logits(hidden)
    return head.whole_logits(logits, comm), head.best_tokens(logits, comm)


def logits_of(
    comm: Comm,
    folder: Path,
    token_ids: list[int],
    source: WeightSource = AS_PUBLISHED,
    is_sequence_parallel: bool = False,
) -> Tensor:
    """Logits of one prompt in chunks. is_sequence_parallel: as of `exchanging`."""
    device = torch.device("cpu")
    model = build_model(folder, dtype=torch.float32, device=device, rank=comm.rank, source=source)
    options = exchanging(model, min_tokens=1, is_sequence_parallel=is_sequence_parallel)
    driver = StepDriver(model, seed=2, options=options, comm=comm)
    driver.admit(0, token_ids)
    return driver.logits_in_chunks(0, 7)


def finite_rows(comm: Comm, folder: Path) -> list[bool]:
    model, attention = build_exact(folder, comm.rank)
    driver = StepDriver(model, seed=6, phased=attention, comm=comm)
    driver.admit(0, list(range(12)))
    driver.admit(1, [3, 4])
    return driver.sample({0: 5, 1: 2}).is_finite


def choices_of(comm: Comm) -> tuple[Limits, Calibration | None]:
    def quickly(*args: Any, **named: Any) -> Calibration:
        return calibrate(*args, **named, budget_s=0.1)

    with patch("engine.build.calibrate", quickly):
        engine = start_engine(
            comm,
            scheduler__max_num_seqs="auto",
            scheduler__max_num_batched_tokens="auto",
            laps__queue="laps",
            laps__max_step_ms="auto",
            laps__max_busy_step_ms="auto",
            edge__max_queued_tokens="auto",
            cache__num_blocks=64,
        )
    return engine.limits, engine.calibration


def fitting_blocks(comm: Comm, free_bytes: Sequence[int]) -> int | str:
    """With so much left of every rank's 1,000 bytes; the error where blocks do not fit."""
    free = free_bytes[comm.rank.index], 1000
    sizes = {"trial_blocks": 3, "block_bytes": 10, "share": 0.9}
    with (
        patch.object(torch.cuda, "synchronize"),
        patch.object(torch.cuda, "empty_cache"),
        patch.object(torch.cuda, "mem_get_info", lambda: free),
    ):
        try:
            return num_blocks_that_fit(lambda: None, **sizes, comm=comm)
        except ConfigError as error:
            return error.message


def fail_to_load(comm: Comm) -> str:
    """What a rank says when the second one cannot load its weights."""
    with patch("engine.models.registry.load_weights", _broken if comm.rank.index else load_weights):
        try:
            start_engine(comm, cache__num_blocks=64)
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
    return "built"


def _broken(*args: object, **named: object) -> None:
    raise ConfigError("no such file")
