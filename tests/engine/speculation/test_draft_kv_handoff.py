"""A draft model's K and V of a prompt move with the target's: nothing of them is computed twice."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.load import load_config
from configs.schema import AppConfig
from engine.engine import Engine
from engine.kv.transfer import HandoffReady, OutgoingEvent
from engine.messages import Role
from engine.models.kv_scales import write_kv_scales
from engine.request import SamplingParams
from engine.runner.prompt_passes import PromptPasses
from engine.speculation.draft_model import DraftModel
from kernels.reference import TorchOps
from load_tests.testbed.local_handoff import LocalPair
from tests.engine.speculation.drafting_stories import exact_drafts, nums_missing
from tests.engine.speculation.eagle_heads import assert_same_drafts, record_proposals
from tests.engine.speculation.exact_engines import start_exact
from tests.engine.speculation.guessed_engines import Asked, Kind, run, save_exact_model
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)
BLOCK_SIZE = 4
APART: dict[str, Any] = {"workers__unified": 0, "workers__prefill": 1, "workers__decode": 1}
MOVES = {"speculation__prompts_on_prefill": True}
# Two layers of the target are as wide as three of these.
OTHER_HEADS: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_exact_model(path, seed=SEED)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is mostly wrong."""
    path = tmp_path_factory.mktemp("draft")
    save_exact_model(path, seed=SEED + 1, **OTHER_HEADS)
    return path


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_drafts():
        yield


def _settings(draft_folder: Path, **more: object) -> dict[str, Any]:
    return {
        "speculation__drafter": "draft_model",
        "speculation__model_path": str(draft_folder),
        "speculation__max_drafts": 3,
        "speculation__max_temperature": 2.0,
        "scheduler__max_num_batched_tokens": 72,  # so that a pass computes any prompt
        **(MOVES | more),
    }


class _Pair(LocalPair):
    """Of exact arithmetic; prompts are computed in chunks."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], of_role: Mapping[Role, dict[str, Any]] = {}
    ) -> None:
        """of_role: settings of one side."""
        self._given = folder, settings, of_role
        self.nums_came: list[int] = []
        super().__init__(load_config(None, {}))
        self.nums_missing = nums_missing(self.decode.core.scheduler.drafting)
        self.proposals = record_proposals(self.decode)

    def build(self, config: AppConfig, role: Role) -> Engine:
        folder, settings, of_role = self._given
        chunks = {"scheduler__max_num_batched_tokens": 16} if role == "prefill" else {}
        given = APART | settings | chunks | of_role.get(role, {})
        return start_exact(folder, role=role, notify=self._note, **given)

    def _note(self, event: OutgoingEvent) -> None:
        super()._note(event)
        if isinstance(event, HandoffReady):
            self.nums_came.append(event.num_drafter_tokens)

    @property
    def prompt_passes(self) -> PromptPasses:
        passes = self.prefill.executor._prompt_passes
        assert passes is not None
        return passes

    def answer_each(self, asked: list[Asked]) -> list[list[int]]:
        return [found.tokens for one in asked for found in self.answer([one])]


def _asked(*lengths: int, shared: int = 0, **kind: Any) -> list[Asked]:
    """Prompts that begin with the same `shared` tokens, and have so many besides."""
    draw = random.Random(f"{SEED} {shared}")
    prefix = draw.choices(range(3, VOCAB_SIZE), k=shared)
    given: Kind = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **kind}
    return [
        (
            prefix + draw.choices(range(3, VOCAB_SIZE), k=length),
            SamplingParams(seed=draw.getrandbits(60), **given),
        )
        for length in lengths
    ]


@pytest.mark.parametrize(
    ("is_target", "overlap"),
    [(True, False), (True, True), (False, False)],
    ids=["its target", "its target ahead", "another model"],
)
def test_the_decode_side_computes_nothing_of_prompts_and_drafts_as_one_worker(
    folder: Path, other: Path, is_target: bool, overlap: bool
) -> None:
    """Of one chunk and several, with and without a full last block, with prefixes found."""
    settings = _settings(folder if is_target else other, scheduler__overlap=overlap)
    asked = _asked(1, 16, 38, shared=BLOCK_SIZE) + _asked(13, shared=17, temperature=1.0)
    one = start_exact(folder, **settings)
    proposals = record_proposals(one)
    expected = [found.tokens for each in asked * 2 for found in run(one, [each])]
    plain = start_exact(folder, speculation__drafter="none")
    assert [found.tokens for each in asked for found in run(plain, [each])] * 2 == expected
    pair = _Pair(folder, settings)
    assert pair.answer_each(asked * 2) == expected
    assert pair.nums_came == [len(prompt) for prompt, _ in asked * 2]
    assert pair.nums_missing == [0] * len(asked) * 2
    there, here = pair.decode.core.scheduler.drafting.counts, one.core.scheduler.drafting.counts
    assert (there.drafted_at, there.accepted_at) == (here.drafted_at, here.accepted_at)
    assert there.num_drafted > 30
    if is_target:
        assert there.num_accepted == there.num_drafted
    else:
        assert_same_drafts(pair.proposals, proposals, num_at_least=4)
    num_each = [len(prompt) for prompt, _ in asked]
    assert sum(num_each) <= pair.prompt_passes.num_computed_tokens < 2 * sum(num_each)
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0


def test_prompts_computed_together_and_preempted_are_drafted_for_as_by_one_worker(
    folder: Path, other: Path
) -> None:
    """What the decode side preempts it computes itself; so both have blocks of many prompts."""
    asked = _asked(1, 5, 20, 9, shared=13, max_tokens=20)
    settings = _settings(other, model__max_model_len=64)
    one = start_exact(folder, **settings)
    proposals = record_proposals(one)
    expected = [found.tokens for found in run(one, asked)]
    pair = _Pair(folder, settings, {"decode": {"cache__num_blocks": 31}})
    for _ in range(2):
        assert [found.tokens for found in pair.answer(asked)] == expected
    assert pair.nums_missing[: len(asked)] == [0] * len(asked)
    assert pair.decode.core.scheduler.statistics().num_preemptions > 0
    assert_same_drafts(pair.proposals, proposals, num_at_least=10)
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0


def test_what_did_not_come_is_computed_on_the_decode_side(folder: Path) -> None:
    """A cached prefix of a request without drafts has nothing of the draft model, and stays so."""
    settings = _settings(folder)
    (without,) = _asked(3, shared=20, temperature=3.0)
    asked = _asked(5, 9, shared=20)
    pair = _Pair(folder, settings)
    plain = start_exact(folder, speculation__drafter="none")
    expected = [found.tokens for each in (without, *asked) for found in run(plain, [each])]
    assert pair.answer_each([without, *asked]) == expected
    assert pair.prompt_passes.num_computed_tokens == 0
    assert pair.nums_came == [0, 0, 0]
    assert pair.nums_missing == [25, 29]
    counts = pair.decode.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 5


def test_prompts_may_be_left_to_the_decode_side(folder: Path) -> None:
    """Then first tokens do not wait for the draft model, and blocks have no room for it."""
    asked = _asked(25, 29)
    pair = _Pair(folder, _settings(folder, speculation__prompts_on_prefill=False))
    plain = start_exact(folder, speculation__drafter="none")
    assert pair.prefill.layout.drafter is None
    expected = [found.tokens for each in asked for found in run(plain, [each])]
    assert pair.answer_each(asked) == expected
    assert pair.nums_came == [0, 0]
    assert pair.nums_missing == [25, 29]


def test_requests_that_get_no_drafts_cost_the_prefill_side_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """They are too hot, too long for the draft model, or end at once."""
    save_exact_model(tmp_path, seed=SEED, max_position_embeddings=32)
    pair = _Pair(folder, _settings(tmp_path))
    hot, (long,), ends = _asked(7, temperature=3.0), _asked(30), _asked(8, max_tokens=2)
    (short,) = _asked(28, shared=1)
    pair.answer_each([*hot, long, *ends])
    assert pair.prompt_passes.num_computed_tokens == 0
    pair.answer_each([short])
    assert pair.prompt_passes.num_computed_tokens == 29  # what leaves room for two more


def test_e4m3_numbers_move_each_of_its_models_scales(folder: Path, tmp_path: Path) -> None:
    """With other scales than the target's, the draft model is as right as in one worker."""
    copytree(folder, other := tmp_path / "draft")
    draw = torch.Generator().manual_seed(SEED)
    scales, weights = tmp_path / "scales.safetensors", other / "model.safetensors"
    write_kv_scales(scales, 2.0 ** torch.randint(-3, 4, (2, 2, 2), generator=draw))
    save_file(load_file(weights) | load_file(scales), weights)
    settings = _settings(other, cache__kv_dtype="fp8_e4m3")
    asked = _asked(6, 21, shared=9)
    one = start_exact(folder, **settings)
    expected = [found.tokens for each in asked for found in run(one, [each])]
    pair = _Pair(folder, settings)
    assert pair.answer_each(asked) == expected
    assert pair.nums_missing == [0] * len(asked)
    there, here = pair.decode.core.scheduler.drafting.counts, one.core.scheduler.drafting.counts
    assert (there.drafted_at, there.accepted_at) == (here.drafted_at, here.accepted_at)
    assert pair.decode.layout.drafter.scales != one.layout.scales


def test_latents_have_no_room_for_it(folder: Path, tmp_path: Path) -> None:
    """As before, the decode side then computes all of it."""
    save_model(tmp_path, "DeepseekV2ForCausalLM", seed=SEED)
    given = APART | _settings(folder)
    prefill = start_exact(tmp_path, role="prefill", notify=print, ops=TorchOps(), **given)
    assert prefill.layout.drafter is None
    assert isinstance(prefill.core.scheduler.drafting.drafter, DraftModel)
