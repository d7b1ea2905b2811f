"""A smaller model drafts for a larger one: same answers, and the draft model's books."""

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.errors import ConfigFileError
from configs.load import load_config
from configs.schema import AppConfig
from engine.cost_model import StepCosts
from engine.engine import Engine
from engine.errors import ConfigError
from engine.messages import Role
from engine.request import SamplingParams
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import StepDrafts, StepOffer
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import FixedDrafts
from load_tests.testbed.local_handoff import LocalPair
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import Asked, assert_same, run, save_exact_model
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)
DRAFTS = {"speculation__drafter": "draft_model", "speculation__max_temperature": 9.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_exact_model(path, seed=SEED)
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    draw = random.Random(SEED)
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.2},
        {"temperature": 0.7, "top_k": 8, "logprobs": 2},
        {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
        {"temperature": 1.0, "allowed_token_ids": (4, 8, 15, 16, 23, 42)},
        {"temperature": 1.5, "min_tokens": 6, "stop_token_ids": tuple(range(0, 99, 5))},
        {"temperature": 1.0, "logit_bias": {4: 9.0}},
        {"temperature": 0.0, "banned_sequences": ((5,), (7, 8))},
    )
    shared = draw.choices(range(3, VOCAB_SIZE), k=13)
    return [
        (
            shared + draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 30)),
            SamplingParams(max_tokens=14, ignore_eos=True, seed=draw.getrandbits(60), **kind),
        )
        for kind in kinds
    ]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_draft_model_equal_to_the_target_is_always_right(
    folder: Path, asked: list[Asked], overlap: bool
) -> None:
    """It sees the same tokens and draws with the same noise, at any temperature.

    Also with passes launched ahead, which only requests without penalties and constraints allow.
    """
    free = [one for one in asked if not (one[1].needs_history or one[1].is_constrained)]
    with exact_arithmetic():
        plain = start_exact(folder, speculation__drafter="none")
        expected, free_expected = run(plain, asked), run(plain, free)
        drafts = DRAFTS | {"speculation__model_path": str(folder), "speculation__max_drafts": 3}
        engine = start_exact(folder, scheduler__overlap=overlap, **drafts)
        drafter = _draft_as_target(engine)
        for _ in range(2):  # the second time with prefixes that are here
            assert_same(run(engine, asked), expected)
            assert not drafter._seats
        assert_same(run(engine, free), free_expected)
        counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 50


class _ExactPair(LocalPair):
    """A prefill and a decode engine whose draft model is their target, in exact arithmetic."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder, self._settings = folder, settings
        super().__init__(load_config(None, {}))

    def build(self, config: AppConfig, role: Role) -> Engine:
        engine = start_exact(self._folder, role=role, notify=self._note, **self._settings)
        if role == "decode":
            _draft_as_target(engine)
        return engine


def _draft_as_target(engine: Engine) -> DraftModel:
    """The same arithmetic, too: its own model rounds in places where the target's does not."""
    drafter = engine.core.scheduler.drafting.drafter
    assert isinstance(drafter, DraftModel)
    drafter._executor._passes.model = engine.executor.model
    return drafter


def test_behind_a_handoff_a_draft_model_is_as_right_as_in_one_worker(
    folder: Path, asked: list[Asked]
) -> None:
    """Only the target's KV comes; what the draft model had in those blocks before does not count.

    One request at a time and few blocks, so that later prompts come into blocks that earlier ones
    left, in another order.
    """
    free = [one for one in asked if not (one[1].needs_history or one[1].is_constrained)]
    assert len(free) > 2
    settings = DRAFTS | {"speculation__model_path": str(folder), "speculation__max_drafts": 3}
    settings |= {"cache__num_blocks": 24, "model__max_model_len": 80}
    with exact_arithmetic():
        expected = run(start_exact(folder, speculation__drafter="none"), free)
        pair = _ExactPair(folder, **settings)
        for _ in range(2):
            for one, plain in zip(free, expected, strict=True):
                (found,) = pair.answer([one])
                assert found.tokens == plain.tokens
    counts = pair.decode.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 50
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0


def test_a_draft_model_that_is_mostly_wrong_changes_nothing(
    folder: Path, asked: list[Asked], tmp_path: Path
) -> None:
    save_model(tmp_path, seed=SEED + 1, num_hidden_layers=1)
    # So long that blocks run out, however short the prompts were drawn.
    asked = [(prompt, replace(params, max_tokens=40)) for prompt, params in asked]
    with exact_arithmetic():
        expected = run(start_exact(folder, speculation__drafter="none"), asked)
        engine = start_exact(
            folder,
            cache__num_blocks=24,
            model__max_model_len=96,
            speculation__model_path=str(tmp_path),
            **DRAFTS,
        )
        assert_same(run(engine, asked), expected)
    assert engine.core.scheduler.statistics().num_preemptions > 0
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted < counts.num_drafted


def test_drafts_end_where_a_constraint_allows_nothing(folder: Path) -> None:
    """The request has the tokens before, and then the target says why it ends."""
    params = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        ignore_eos=True,
        allowed_token_ids=(4, 5),
        banned_sequences=((4, 4), (4, 5), (5, 4), (5, 5)),
    )
    drafts = DRAFTS | {"speculation__model_path": str(folder), "speculation__max_drafts": 4}
    with exact_arithmetic():
        engine = start_exact(folder, **drafts)
        with pytest.raises(AssertionError, match="the constraint on the output allows no token"):
            run(engine, [(list(range(3, 20)), params)])


class _ManyOrOne(FixedDrafts):
    """Eight drafts a row and one, in turn."""

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        self._num_drafts = 9 - self._num_drafts
        return super().plan(offer, costs)


def test_a_request_may_outgrow_a_draft_model_of_a_shorter_context(
    folder: Path, tmp_path: Path
) -> None:
    """Its row has blocks for more tokens than the draft model's has room for."""
    save_model(tmp_path, seed=SEED, max_position_embeddings=64)
    prompt = random.Random(SEED).choices(range(3, VOCAB_SIZE), k=50)
    asked = [(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))]
    with exact_arithmetic():
        expected = run(start_exact(folder, speculation__drafter="none"), asked)
        engine = start_exact(folder, speculation__model_path=str(tmp_path), **DRAFTS)
        drafter = engine.core.scheduler.drafting.drafter
        engine.core.scheduler.drafting = Drafting(drafter, _ManyOrOne(1), holds=False)
        assert_same(run(engine, asked), expected)


def test_kv_that_is_here_is_not_computed_again(folder: Path) -> None:
    prompt = random.Random(SEED).choices(range(3, VOCAB_SIZE), k=40)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    drafts = DRAFTS | {"speculation__model_path": str(folder), "speculation__max_drafts": 2}
    with exact_arithmetic():
        engine = start_exact(folder, **drafts)
        drafter = engine.core.scheduler.drafting.drafter
        assert isinstance(drafter, DraftModel)
        run(engine, [(prompt, params)])
        first = drafter.num_computed_tokens
        run(engine, [(prompt, params)])
    assert first > 40
    assert drafter.num_computed_tokens - first < 20


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match="same vocabulary"):
        start_exact(folder, speculation__model_path=str(tmp_path), **DRAFTS)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"speculation.drafter": "draft_model"}, "needs the folder"),
        ({"speculation.drafter": "ngram", "speculation.model_path": "x"}, "nothing else reads"),
        (
            {
                "speculation.drafter": "draft_model",
                "speculation.model_path": "x",
                "model.device": "cuda",
            },
            "needs cache.num_blocks",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigFileError, match=problem):
        load_config(None, settings)
