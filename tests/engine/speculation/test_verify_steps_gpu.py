"""Steps with drafts on a GPU: decode attention for them, and graphs, change no answer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.kv.transfer import OutgoingEvent
from engine.request import SamplingParams
from engine.runner.graphs import CudaRecorder
from engine.runner.overlap.rule import OverlapRule
from tests.engine.speculation.guessed_engines import Asked, assert_same, guess, run
from tests.harness.in_process import Answer
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

pytestmark = pytest.mark.gpu

SEED = seed_of(__name__)
MAX_LOGPROB_ERROR = 0.1  # bf16 and other tiles in three layers
DECODE = {"speculation__attention_backend": "decode", "model__attention__decode": "triton"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(
        path,
        "Qwen3ForCausalLM",
        seed=SEED,
        hidden_size=512,
        intermediate_size=720,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    draw = random.Random(SEED)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 0},
        {"temperature": 1.2, "top_p": 0.9, "logprobs": 0},
    ]
    return [
        (
            draw.choices(range(3, VOCAB_SIZE), k=draw.choice([3, 15, 16, 90, 400])),
            SamplingParams(
                **kinds[i % len(kinds)], max_tokens=40, ignore_eos=True, seed=draw.getrandbits(60)
            ),
        )
        for i in range(24)
    ]


def _no_handoff(event: OutgoingEvent) -> None:
    raise AssertionError(f"a unified engine hands nothing over: {event}")


def _start(folder: Path, **overrides: object) -> Engine:
    dotted: dict[str, object] = {
        "model.path": str(folder),
        "model.device": "cuda",
        "cache.num_blocks": 1024,
        "cache.block_size": 16,
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": 16,
        "scheduler.max_num_batched_tokens": 512,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return build_engine(load_config(None, dotted), "test", MonotonicClock(), _no_handoff)


def _guessing(folder: Path, **overrides: object) -> Engine:
    return _start(folder, speculation__drafter="ngram", speculation__adaptive=False, **overrides)


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[Asked]) -> list[Answer]:
    return run(_start(folder), asked)


@pytest.fixture(scope="module")
def fixed(folder: Path, asked: list[Asked]) -> list[Answer]:
    """Answers of deterministic mode."""
    return run(_start(folder, model__deterministic=True), asked)


@pytest.mark.parametrize(
    ("max_graph_tokens", "splits"),
    [(0, False), (96, False), (96, True)],
    ids=["no graphs", "graphs", "graphs of two batches"],
)
def test_deterministic_answers_with_drafts_are_those_without_bit_by_bit(
    folder: Path, asked: list[Asked], fixed: list[Answer], max_graph_tokens: int, splits: bool
) -> None:
    engine = _guessing(
        folder,
        model__deterministic=True,
        speculation__max_drafts=4,
        speculation__max_graph_tokens=max_graph_tokens,
    )
    if splits:
        rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=10)
        engine.executor.overlap_two_batches(rule, threshold=0.48)
        engine.executor.capture_split_verification(CudaRecorder(), print, min_tokens=10)
    guess(engine, asked, fixed, num_drafts=4, error_rate=0.2, seed=SEED)
    assert_same(run(engine, asked), fixed)
    assert engine.core.scheduler.drafting.counts.num_accepted > 200
    if splits:
        assert engine.executor.two_batches.statistics().num_replayed > 10


def _drafting_itself(folder: Path, **overrides: object) -> Engine:
    return _start(
        folder,
        speculation__drafter="draft_model",
        speculation__model_path=str(folder),
        speculation__adaptive=False,
        speculation__max_drafts=3,
        speculation__max_temperature=9.0,
        **overrides,
    )


@pytest.mark.parametrize("is_free", [False, True], ids=["some waited for", "all ahead"])
@pytest.mark.parametrize("max_graph_tokens", [0, 64])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_draft_model_equal_to_the_target_is_always_right(
    folder: Path,
    asked: list[Asked],
    fixed: list[Answer],
    is_free: bool,
    max_graph_tokens: int,
    overlap: bool,
) -> None:
    """Passes are launched ahead where no choice depends on which tokens the drafts are.

    Overlapped, the target's steps are, too: before the host knows how many tokens the last gave.
    """
    pairs = [
        (one, found)
        for one, found in zip(asked, fixed, strict=True)
        if not (is_free and one[1].needs_history)
    ]
    some, expected = zip(*pairs, strict=True)
    engine = _drafting_itself(
        folder,
        model__deterministic=True,
        scheduler__overlap=overlap,
        speculation__max_graph_tokens=max_graph_tokens,
    )
    assert_same(run(engine, some), expected)
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 200


@pytest.mark.parametrize("settings", [{"speculation__max_graph_tokens": 0}, DECODE])
def test_rows_planned_ahead_attend_to_what_they_have(
    folder: Path, asked: list[Asked], settings: dict[str, object]
) -> None:
    """By the backends of free mode: with keys too many or too few, an equal model would differ."""
    free = [one for one in asked if not one[1].needs_history]
    engine = _drafting_itself(folder, **settings)
    run(engine, free)
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted > 0.85 * counts.num_drafted > 200


@pytest.mark.parametrize(
    "settings",
    [
        {**DECODE, "speculation__max_graph_tokens": 0},
        {**DECODE, "speculation__max_graph_tokens": 96},
        {"speculation__max_graph_tokens": 96},
    ],
    ids=["decode", "decode in graphs", "prefill in graphs"],
)
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_answers_with_drafts_are_near_those_without(
    folder: Path,
    asked: list[Asked],
    plain: list[Answer],
    settings: dict[str, object],
    num_drafts: int,
) -> None:
    """Other tiles: log-probabilities agree up to the first token that a near tie decides."""
    engine = _guessing(folder, **settings)
    guess(engine, asked, plain, num_drafts=num_drafts, error_rate=0.2, seed=SEED)
    num_same = 0
    for our, their in zip(run(engine, asked), plain, strict=True):
        for ours, theirs in zip(our.records, their.records, strict=True):
            if ours.token_id != theirs.token_id:
                break
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert abs(ours.logprobs.chosen - theirs.logprobs.chosen) < MAX_LOGPROB_ERROR
            num_same += 1
    assert num_same > 24 * 40 // 3
    assert engine.core.scheduler.drafting.counts.num_accepted > 40 * num_drafts


def test_a_mix_of_prompts_and_rows_with_and_without_drafts(
    folder: Path, asked: list[Asked], plain: list[Answer]
) -> None:
    engine = _guessing(folder, scheduler__max_num_batched_tokens=64, **DECODE)
    guess(engine, asked, plain, num_drafts=6, error_rate=0.5, seed=SEED)
    found = run(engine, asked)
    firsts = [our.tokens[0] == their.tokens[0] for our, their in zip(found, plain, strict=True)]
    assert sum(firsts) > 18
