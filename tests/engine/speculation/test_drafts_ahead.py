"""Steps with drafts launched before the last one's drafts are judged: the same answers, no gaps."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from torch import Tensor

from engine import build_drafting
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.llama import attention_shape
from engine.plan import NEWEST, StepPlan
from engine.request import SamplingParams
from engine.runner.executor import Executor
from engine.runner.graph_sizes import ragged_sizes, verify_sizes
from engine.runner.inputs import InputBatch
from engine.scheduling.drafting import Drafting
from engine.speculation.draft_model import DraftModel
from kernels.attention.phased import PhasedAttention
from tests.engine.runner.graph_story import RerunRecorder
from tests.engine.speculation.eagle_heads import save_head
from tests.engine.speculation.exact_engines import exact_arithmetic, exact_model, start_exact
from tests.engine.speculation.guessed_engines import Asked, assert_same, run, save_exact_model
from tests.engine.speculation.verify_graphs import ExactRows
from tests.harness.drafters import EveryOtherStep
from tests.harness.in_process import Answer
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)
FREE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 0.7, "top_k": 8, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {4: 9.0}},
    {"temperature": 1.3, "stop_token_ids": tuple(range(0, 99, 7)), "ignore_eos": False},
)
HELD: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "allowed_token_ids": (4, 8, 15, 16, 23, 42)},
    {"temperature": 1.5, "min_tokens": 6, "stop_token_ids": (4, *range(0, 99, 5))},
)


def _asked(kinds: tuple[dict[str, Any], ...], seed: int) -> list[Asked]:
    """A request of each kind; the prompts begin with the same 13 tokens and have 14 to 42."""
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCAB_SIZE), k=13)
    return [
        (
            shared + draw.choices(range(3, VOCAB_SIZE), k=1 + 4 * i),
            SamplingParams(
                **{"max_tokens": draw.randint(16, 24), "ignore_eos": True, **kind},
                seed=draw.getrandbits(60),
            ),
        )
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays hangs on how long steps take here; rows ahead are what is tested."""
    monkeypatch.setattr(Drafting, "pays_to_wait", lambda *_, **__: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_exact_model(path, seed=SEED, num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return _asked((*FREE, *HELD), SEED)


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[Asked]) -> list[Answer]:
    with exact_arithmetic():
        return run(start_exact(folder, speculation__drafter="none"), asked)


@contextmanager
def launched_plans() -> Iterator[list[tuple[Executor, StepPlan]]]:
    """What any executor launches meanwhile."""
    launch, plans = Executor.launch, list[tuple[Executor, StepPlan]]()

    def note(self: Executor, plan: StepPlan) -> Any:
        plans.append((self, plan))
        return launch(self, plan)

    with patch.object(Executor, "launch", note):
        yield plans


# How a plan meets the device: it becomes true before it is launched, or its inputs are moved there,
# before kernels or before graphs.
WAYS = ["made true", "moved", "moved in graphs"]
# Of the same drafts, moved before kernels is between both others.
WAYS_BY_DAY = ["made true", pytest.param("moved", marks=pytest.mark.nightly), "moved in graphs"]


def _start(
    folder: Path, drafter: str, path: Path | None, *, way: str, **overrides: object
) -> Engine:
    """way: one of WAYS; inputs are moved for attention that knows nothing but tensors."""
    engine = start_exact(
        folder,
        scheduler__overlap=True,
        speculation__drafter=drafter,
        speculation__model_path=None if path is None else str(path),
        speculation__max_temperature=9.0,
        **{"speculation__max_drafts": 3, "speculation__adaptive": False, **overrides},
    )
    if way != "made true":
        drafts = engine.draft_passes
        for executor in (engine.executor, *([drafts.executor] if drafts else [])):
            assert isinstance(executor, Executor)
            _move_inputs(executor, captures=way == "moved in graphs")
    return engine


def _move_inputs(executor: Executor, *, captures: bool) -> None:
    rows = ExactRows(attention_shape(executor.model.spec))
    given = {"prefill": rows, "decode": rows, "graph": rows, "prompt_graph": rows}
    executor._passes.attention = PhasedAttention(**given)
    assert executor.guesses is not None
    executor.guesses._attention = executor._passes.attention
    if captures:
        prompts = ragged_sizes(6, 32)
        executor.capture_graphs(RerunRecorder(), print, prompts=prompts, verify=verify_sizes(6, 32))
        executor.kv_store.tensor.fill_(50.0)


def _drafter(engine: Engine) -> DraftModel:
    drafter = engine.core.scheduler.drafting.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize("way", WAYS_BY_DAY)
def test_drafts_of_an_equal_model_are_all_right(
    folder: Path, asked: list[Asked], plain: list[Answer], way: str
) -> None:
    """It draws with the target's noise, so each token, position and index is where it belongs."""
    # Graphs keep the model that they were captured with.
    with patch("engine.runner.executor_builder.build_model", lambda *_, **__: exact_model(folder)):
        engine = _start(folder, "draft_model", folder, way=way)
    with exact_arithmetic(), launched_plans() as plans:
        for _ in range(2):  # the second time with prefixes that are here
            assert_same(run(engine, asked), plain)
    counts = engine.core.scheduler.drafting.counts
    num_stopped = sum(2 for answer in plain if answer.finish == "stop")
    assert 100 < counts.num_drafted <= counts.num_accepted + 3 * num_stopped
    assert sum(len(plan.ahead) for executor, plan in plans if executor is engine.executor) > 20


@pytest.mark.parametrize(
    ("drafter", "way"),
    [
        ("draft_model", "made true"),
        ("draft_model", "moved in graphs"),
        ("eagle3", "moved"),
        pytest.param("eagle3", "moved in graphs", marks=pytest.mark.nightly),
        pytest.param("draft_model", "moved", marks=pytest.mark.nightly),
        pytest.param("eagle3", "made true", marks=pytest.mark.nightly),
    ],
)
def test_wrong_drafts_change_no_answer(
    folder: Path,
    asked: list[Asked],
    plain: list[Answer],
    tmp_path: Path,
    drafter: str,
    way: str,
) -> None:
    """Few blocks, so that requests are preempted, and chunks beside rows with drafts."""
    if drafter == "eagle3":
        save_head(tmp_path, seed=SEED, eagle_config={}, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    else:
        save_model(tmp_path, seed=SEED + 1, num_hidden_layers=1)
    engine = _start(folder, drafter, tmp_path, way=way, cache__num_blocks=30)
    with exact_arithmetic(), launched_plans() as plans:
        assert_same(run(engine, asked), plain)
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted < counts.num_drafted
    assert engine.core.scheduler.statistics().num_preemptions > 0
    assert any(plan.ahead for executor, plan in plans if executor is engine.executor)


def _repeating(seed: int) -> list[Asked]:
    """Prompts that repeat a few words, and answers that are likely to."""
    draw = random.Random(seed)
    asked: list[Asked] = []
    for kind in (*FREE, *HELD) * 2:
        words = draw.choices(range(3, 12), k=draw.randint(2, 6))
        fields = {"max_tokens": draw.randint(16, 24), "ignore_eos": True, **kind}
        if "allowed_token_ids" not in kind:
            fields["logit_bias"] = {4: 30.0, 5: 30.0}
        params = SamplingParams(**fields, seed=draw.getrandbits(60))
        asked.append(((words * 9)[: draw.randint(8, 25)], params))
    return asked


@pytest.fixture(scope="module")
def repeating() -> list[Asked]:
    return _repeating(SEED)


@pytest.fixture(scope="module")
def repeated(folder: Path, repeating: list[Asked]) -> list[Answer]:
    with exact_arithmetic():
        return run(start_exact(folder, speculation__drafter="none"), repeating)


@pytest.mark.parametrize("way", WAYS_BY_DAY)
def test_ngrams_that_the_device_looks_up_change_no_answer(
    folder: Path, repeating: list[Asked], repeated: list[Answer], way: str
) -> None:
    """Behind tokens in flight, right or wrong; from cached prefixes, and preempted.

    At last with steps without drafts between, which rows go on through.
    """
    engine = _start(
        folder,
        "ngram",
        None,
        way=way,
        cache__num_blocks=30,
        speculation__ngrams_on_device=True,
    )
    with exact_arithmetic(), launched_plans() as plans:
        for _ in range(2):
            assert_same(run(engine, repeating), repeated)
        engine.core.scheduler.drafting.use_policy(EveryOtherStep(3, max_temperature=9.0))
        assert_same(run(engine, repeating), repeated)
    counts = engine.core.scheduler.drafting.counts
    assert 20 < counts.num_accepted < counts.num_drafted
    assert engine.core.scheduler.statistics().num_preemptions > 0
    assert sum(its[-1] < NEWEST for _, plan in plans for _, its in plan.drafts if its) > 20


def test_a_text_that_goes_on_repeating_is_drafted_in_every_step(folder: Path) -> None:
    """The device finds what the host would: all is right once the text repeats itself."""
    params = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias={4: 1e6}, logprobs=None
    )
    engine = _start(folder, "ngram", None, way="made true", speculation__ngrams_on_device=True)
    with exact_arithmetic(), launched_plans() as plans:
        run(engine, [([9, 4, 4, 4, 4], params)])
    steps = [plan for executor, plan in plans if executor is engine.executor and plan.rows]
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted >= 27
    assert [bool(plan.ahead) for plan in steps][2:-3] == [True] * (len(steps) - 5)


@pytest.mark.parametrize(
    ("drafter", "way"),
    [
        ("ngram", "moved"),
        ("draft_model", "made true"),
        pytest.param("ngram", "made true", marks=pytest.mark.nightly),
        pytest.param("draft_model", "moved", marks=pytest.mark.nightly),
    ],
)
def test_a_context_is_filled_to_its_last_token(
    folder: Path, repeating: list[Asked], drafter: str, way: str
) -> None:
    """What is planned behind the last token of a context has no room, in rows and in texts."""
    longer = {"max_tokens": 99, "ignore_eos": True}
    asked = [(prompt, replace(params, **longer)) for prompt, params in repeating]
    length = {"model__max_model_len": 41, "cache__num_blocks": 60}
    path = folder if drafter == "draft_model" else None
    looks_up = {"speculation__ngrams_on_device": True} if path is None else {}
    with exact_arithmetic():
        expected = run(start_exact(folder, speculation__drafter="none", **length), asked)
        engine = _start(folder, drafter, path, way=way, **length, **looks_up)
        assert_same(run(engine, asked), expected)
    assert {answer.finish for answer in expected} == {"length", "stop"}


def test_an_answer_ends_in_as_few_steps_as_its_drafts_allow(folder: Path) -> None:
    """No step is waited for because it may give the last token: four tokens in each."""
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    params = replace(params, logit_bias={4: 1e6})
    engine = _start(folder, "ngram", None, way="made true", speculation__ngrams_on_device=True)
    with exact_arithmetic(), launched_plans() as plans:
        run(engine, [([9, 4, 4, 4, 4], params)])
    # A prompt, ten steps of four tokens, and one that was planned before the last one was known.
    assert sum(bool(plan.rows) for _, plan in plans) <= 12


def test_no_request_is_the_first_whose_drafts_are_looked_up(folder: Path) -> None:
    """On a GPU it would wait for kernels to compile."""
    with exact_arithmetic(), launched_plans() as plans:
        engine = _start(folder, "ngram", None, way="made true", speculation__ngrams_on_device=True)
    assert sum(bool(plan.ahead and plan.texts) for _, plan in plans) >= 2
    assert not any(engine.executor._rows.tokens.is_occupied(row) for row in range(4))


@pytest.mark.parametrize(
    "sizes",
    [
        {"scheduler__max_num_seqs": 2, "scheduler__max_num_batched_tokens": 4},
        {"cache__block_size": 1, "cache__num_blocks": 8, "model__max_model_len": 8},
    ],
)
def test_an_engine_starts_that_is_too_small_to_try_lookups(
    folder: Path, sizes: dict[str, object]
) -> None:
    engine = start_exact(folder, scheduler__overlap=True, speculation__drafter="ngram", **sizes)
    drafter = engine.core.scheduler.drafting.drafter
    assert drafter is not None
    assert drafter.can_propose_ahead


@pytest.mark.parametrize(
    ("asked", "overlaps", "max_bytes", "looks_up"),
    [
        ("auto", True, 2**28, True),
        ("auto", True, 2**12, False),
        ("auto", False, 2**28, False),
        (False, True, 2**28, False),
    ],
)
def test_auto_looks_drafts_up_where_that_is_possible_and_small(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: object,
    overlaps: bool,
    max_bytes: int,
    looks_up: bool,
) -> None:
    monkeypatch.setattr(build_drafting, "_MAX_TEXT_BYTES", max_bytes)
    given = {"speculation__ngrams_on_device": asked, "scheduler__overlap": overlaps}
    engine = start_exact(folder, speculation__drafter="ngram", **given)
    drafter = engine.core.scheduler.drafting.drafter
    assert drafter is not None
    assert drafter.can_propose_ahead == looks_up


def test_looking_up_where_steps_do_not_overlap_is_refused(folder: Path) -> None:
    given = {"speculation__ngrams_on_device": True, "scheduler__overlap": False}
    with pytest.raises(ConfigError, match="ngrams_on_device: steps do not overlap; set sch"):
        start_exact(folder, speculation__drafter="ngram", **given)


def test_a_finished_answer_is_drafted_from_in_every_step(folder: Path) -> None:
    """Where a text does not repeat a pair of its own, the device has a quote of the answer."""
    draw = random.Random(SEED)
    params = SamplingParams(max_tokens=100, temperature=9.0, ignore_eos=True, seed=SEED)
    asked = [(draw.choices(range(3, VOCAB_SIZE), k=10), params)]
    engine = _start(folder, "ngram", None, way="made true", speculation__ngrams_on_device=True)
    counts = engine.core.scheduler.drafting.counts
    with exact_arithmetic():
        first = run(engine, asked)
        before = counts.num_drafted, counts.num_accepted
        with launched_plans() as plans:
            assert_same(run(engine, asked), first)
    num_drafted, num_right = counts.num_drafted - before[0], counts.num_accepted - before[1]
    pairs = list(pairwise([*asked[0][0], *first[0].tokens]))
    num_repeated = len(pairs) - len(set(pairs))  # by chance; each may cost a step its three drafts
    assert num_drafted - num_right <= 3 * num_repeated
    assert num_right >= 70 - num_repeated
    # Of four tokens, where 25 is the least.
    assert sum(bool(plan.rows) for _, plan in plans) < 35 + num_repeated


def test_rows_that_may_go_ahead_are_in_every_step(folder: Path) -> None:
    """From their first drafts until a step may give the last token."""
    draw = random.Random(SEED)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = _start(folder, "draft_model", folder, way="made true")
    prompt = draw.choices(range(3, VOCAB_SIZE), k=10)
    with exact_arithmetic(), launched_plans() as plans:
        run(engine, [(prompt, params)])
    steps = [plan for executor, plan in plans if executor is engine.executor and plan.rows]
    num_begun, num_ending = 2, 4
    is_ahead = [bool(plan.ahead) for plan in steps]
    assert all(is_ahead[num_begun : len(steps) - num_ending])
    assert len(steps) > 10


@pytest.mark.parametrize("way", ["made true", "moved"])
def test_a_row_that_draws_nothing_begins_anew(
    folder: Path, asked: list[Asked], plain: list[Answer], way: str
) -> None:
    """Its next step is launched before that is known, and the drafter's passes for it."""
    engine = _start(folder, "draft_model", folder, way=way)
    numbers = count(1)

    def draw_nothing(drawn: Tensor, batch: InputBatch, table: Tensor) -> None:
        if next(numbers) == 2:
            drawn[: batch.sampling.tolist().count(0)] = -1  # the first row's lines

    assert engine.executor.guesses is not None
    engine.executor.guesses.rows.overrule = draw_nothing
    with exact_arithmetic():
        assert_same(run(engine, asked[:1]), plain[:1])
    assert engine.core.scheduler.statistics().num_preemptions == 1
