"""Steps with drafts by a backend of their own, and padded to graphs of their own: same answers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.runner.graph_sizes import split_verify_sizes, verify_sizes
from engine.runner.overlap.split_decodes import split_of
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape, AttentionStep
from kernels.attention.reference import ReferenceAttention
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import (
    Asked,
    assert_same,
    guess,
    run,
    save_exact_model,
)
from tests.engine.speculation.verify_graphs import capture_verification
from tests.harness.in_process import Answer
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE
from tests.kernels.attention.attention_cases import assert_close, build_problem, run_layer

SEED = seed_of(__name__)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.6, "top_p": 0.8, "logprobs": 3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 2},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, 60, 7)), "ignore_eos": False},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    save_exact_model(path, seed=SEED)
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    draw = random.Random(SEED)
    return [
        (
            draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 30)),
            SamplingParams(
                **{"max_tokens": 16, "ignore_eos": True, **kind}, seed=draw.getrandbits(60)
            ),
        )
        for kind in KINDS * 2
    ]


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[Asked]) -> list[Answer]:
    with exact_arithmetic():
        return run(start_exact(folder, speculation__drafter="none"), asked)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_answers_are_those_without_drafts_by_the_backend_of_decode_steps(
    folder: Path, asked: list[Asked], plain: list[Answer], overlap: bool
) -> None:
    engine = start_exact(
        folder, speculation__attention_backend="decode", scheduler__overlap=overlap
    )
    assert engine.executor.attends_few_tokens_apart
    guess(engine, asked, plain, num_drafts=3, error_rate=0.3, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
    assert engine.core.scheduler.drafting.counts.num_accepted > 20


# ---- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_drafts", "overlap"), [(3, False), (8, True)])
def test_answers_are_those_without_drafts_in_graphs_of_any_mix(
    folder: Path, asked: list[Asked], plain: list[Answer], num_drafts: int, overlap: bool
) -> None:
    """Rows with one to nine tokens side by side: after every one the graph has a line of logits."""
    engine = start_exact(folder, scheduler__overlap=overlap)
    recorder = capture_verification(engine, 32)
    guess(engine, asked, plain, num_drafts=num_drafts, error_rate=0.4, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
    assert recorder.num_replays > 5
    statistics = engine.executor.statistics().verify_graphs
    assert statistics is not None
    assert statistics.num_graphs == len(verify_sizes(6, 32))


@pytest.mark.parametrize(("num_drafts", "split_from"), [(2, 2), (4, 12)])
def test_halves_of_the_rows_give_the_answers_of_whole_steps(
    folder: Path, asked: list[Asked], plain: list[Answer], num_drafts: int, split_from: int
) -> None:
    """Rows in spans, some of them with fewer drafts; steps that spans would pad stay whole."""
    engine = start_exact(folder, speculation__max_drafts=num_drafts)
    capture_verification(engine, 32, split_from=split_from)
    guess(engine, asked, plain, num_drafts=num_drafts, error_rate=0.4, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
    assert engine.executor.two_batches.statistics().num_replayed > 2


@pytest.mark.parametrize("max_drafts", range(1, 9))
def test_every_step_in_a_split_graph_has_rows_in_both_halves(max_drafts: int) -> None:
    """And half of its rows is half of its tokens."""
    for size in split_verify_sizes(24, 1 + max_drafts, 150):
        split = split_of(size)
        assert (split.row, split.token) == (size.num_rows // 2, split.row * (1 + max_drafts))
        assert 0 < split.row < size.num_rows <= 24
        assert size.num_tokens <= 150
        assert size.num_lines == size.num_tokens


def test_steps_that_no_graph_holds_are_computed_without_one(
    folder: Path, asked: list[Asked], plain: list[Answer]
) -> None:
    engine = start_exact(folder)
    recorder = capture_verification(engine, 2)
    guess(engine, asked, plain, num_drafts=4, error_rate=0.2, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
    assert engine.core.scheduler.drafting.counts.num_drafted > 40
    assert recorder.num_replays < 10


def test_sizes_of_steps_with_drafts_have_a_line_for_each_token() -> None:
    sizes = verify_sizes(4, 20)
    assert [size.num_tokens for size in sizes] == [2, 4, 8, 16, 20]
    assert [size.num_rows for size in sizes] == [2, 4, 4, 4, 4]
    assert [size.num_lines for size in sizes] == [2, 4, 8, 16, 20]


# ---- attention by phases ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 1), (19, 1), (5, 2), (7, 4), (0, 11), (3, 6)],
        [(5, 2), (7, 4)],
        [(2, 1), (5, 3)],
        [(2, 1), (0, 9)],
        [(4, 3), (0, 9), (8, 2)],  # a long row before a short one, as two batches may cut them
    ],
)
def test_rows_of_few_tokens_are_attended_by_their_own_backend(rows: list[tuple[int, int]]) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, layer_windows=(None, 3))
    problem = build_problem(rows, shape, block_size=4, dtype=torch.float32)

    class Watched(ReferenceAttention):
        longest = 0

        def plan(self, step: AttentionStep) -> Any:
            self.longest = max(self.longest, step.max_new_tokens)
            return super().plan(step)

    given = {"block_size": 4, "dtype": torch.float32, "device": torch.device("cpu")}
    prefill, decode, verify = (Watched(shape, **given) for _ in range(3))  # type: ignore[arg-type]
    phases = PhasedAttention(prefill=prefill, decode=decode, graph=None)
    phases.verify_with(verify, 4)
    for layer in range(2):
        out = run_layer(phases, problem, layer, phases.plan(problem.step))
        assert_close(out, problem.exact(layer), 1e-5)
    leading = [num for i, (_, num) in enumerate(rows) if max(n for _, n in rows[: i + 1]) <= 4]
    assert verify.longest == (max(leading) if max(leading) > 1 else 0)
    assert decode.longest <= 1


# ---- what is refused ----------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_the_way_out(folder: Path) -> None:
    from configs.errors import ConfigFileError

    with pytest.raises(ConfigError, match=r"max_graph_tokens.*attention_backend to decode"):
        start_exact(folder, speculation__max_graph_tokens=32)
    with pytest.raises(ConfigFileError, match="drafter is none"):
        start_exact(folder, speculation__drafter="none", speculation__attention_backend="decode")
