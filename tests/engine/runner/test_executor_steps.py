"""What `launch` does beyond logits: sampling, memory of tokens, broken rows, wrong plans."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from engine.models.llama import CausalLM, ForwardResult
from engine.models.registry import build_model
from engine.request import SamplingParams
from engine.sampling.sampled import SampledTensors
from engine.sampling.sampler import Sampler
from kernels.sampling.choices import GreedyChoice
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import GREEDY, StepDriver
from tests.harness.tiny_models import reference_logits, save_model

POISON = 101  # a token whose embedding is NaN in `poisoned`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(made, "Qwen3ForCausalLM", seed=11)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return build_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    made = tmp_path_factory.mktemp("poisoned")
    hf_model: PreTrainedModel = save_model(
        made, "MistralForCausalLM", seed=12, sliding_window=6, num_hidden_layers=1
    )
    with torch.no_grad():
        hf_model.get_parameter("model.embed_tokens.weight")[POISON] = torch.nan
    hf_model.save_pretrained(made)
    return made, build_model(made, dtype=torch.float32, device=torch.device("cpu"))


def _greedy(folder: Path, token_ids: list[int], num_new: int) -> list[int]:
    """transformers' own greedy continuation, recomputed whole for every token."""
    known = list(token_ids)
    for _ in range(num_new):
        known.append(int(reference_logits(folder, known)[-1].argmax()))
    return known[len(token_ids) :]


class RecordingSampler(Sampler):
    """The real sampler, with its calls written down."""

    def __init__(self, model: CausalLM, max_rows: int) -> None:
        super().__init__(model.spec.vocab_size, max_rows, (), model.device)
        self.calls: list[tuple[object, ...]] = []

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self.calls.append(("add", row, prompt_ids, output_ids))
        super().add(row, params, prompt_ids, output_ids)

    def remove(self, row: int) -> None:
        self.calls.append(("remove", row))
        super().remove(row)


def test_sampled_tokens_feed_the_next_step(folder: Path, model: CausalLM) -> None:
    driver = StepDriver(model, seed=1)
    prompts = {0: [5, 6, 7, 8, 9], 1: [3], 2: [8] * 13}
    for row, prompt in prompts.items():
        driver.admit(row, prompt)
    driver.sample({2: 13, 0: 5, 1: 1})
    for step in range(6):
        rows = [0, 1, 2] if step % 2 else [2, 0, 1]
        driver.sample(dict.fromkeys(rows, 1))
    for row, prompt in prompts.items():
        assert driver.tokens[row][len(prompt) :] == _greedy(folder, prompt, 7)


def test_a_step_may_be_launched_before_the_one_it_continues_was_waited_for(
    folder: Path, model: CausalLM
) -> None:
    driver = StepDriver(model, seed=16)
    prompts = {0: [5, 6, 7, 8, 9], 1: [3]}
    for row, prompt in prompts.items():
        driver.admit(row, prompt)
    pending = [driver.executor.launch(driver.plan({1: 1, 0: 5}, samples=True))]
    for _ in range(5):
        for row in prompts:
            driver.tokens[row].append(-1)  # counted as known; its id is not
        pending.append(driver.executor.launch(driver.plan({0: 1, 1: 1}, samples=True)))
    results = [step.wait() for step in pending]
    by_row = {1: [results[0].tokens[0]], 0: [results[0].tokens[1]]}
    for result in results[1:]:
        by_row[0].append(result.tokens[0])
        by_row[1].append(result.tokens[1])
    for row, prompt in prompts.items():
        assert [t for (t,) in by_row[row]] == _greedy(folder, prompt, 6)


def test_what_a_step_drew_is_known_when_another_has_its_memory(model: CausalLM) -> None:
    """A rank that follows may have waited for a step before the next one asks for its tokens."""
    driver = StepDriver(model, seed=3)
    driver.admit(0, [5, 6, 7])
    first = driver.executor.launch(driver.plan({0: 3}, samples=True))
    [[drawn]] = first.wait().tokens
    other = (drawn + 1) % model.spec.vocab_size
    driver.admit(1, [5, 6, 7], params=msgspec.structs.replace(GREEDY, logit_bias={other: 100.0}))
    assert driver.sample({1: 3}).tokens == [[other]]
    assert first.wait_drawn([0]) == [drawn]


def test_results_come_in_plan_order_with_logprobs_where_asked(
    folder: Path, model: CausalLM
) -> None:
    driver = StepDriver(model, seed=2)
    driver.admit(0, [5, 6, 7, 8, 9], params=msgspec.structs.replace(GREEDY, logprobs=2))
    driver.admit(1, [3])
    driver.admit(2, [4, 4, 4])
    plan = driver.plan({0: 5, 1: 1, 2: 2}, samples=True)
    result = driver.executor.launch(plan).wait()
    assert result.step == plan.step
    assert result.tokens == [_greedy(folder, [5, 6, 7, 8, 9], 1), _greedy(folder, [3], 1), []]
    assert result.is_finite == [True, True, True]
    assert result.logprobs[1:] == [None, None]
    exact = reference_logits(folder, [5, 6, 7, 8, 9])[-1].log_softmax(-1)
    assert result.logprobs[0] is not None
    (logprobs,) = result.logprobs[0]
    assert logprobs.chosen == pytest.approx(float(exact.max()), abs=1e-4)
    assert logprobs.top_ids == exact.topk(2).indices.tolist()


def test_a_step_that_only_gives_rows_back_has_no_rows(model: CausalLM) -> None:
    sampler = RecordingSampler(model, 8)
    driver = StepDriver(model, seed=3, sampler=sampler)
    driver.admit(4, [1, 2, 3])
    driver.sample({4: 3})
    driver.release(4)
    result = driver.executor.launch(driver.plan({})).wait()
    assert (result.tokens, result.logprobs, result.is_finite) == ([], [], [])
    assert sampler.calls == [("add", 4, [1, 2, 3], []), ("remove", 4)]


def test_admission_hands_prompt_and_output_to_the_sampler_apart(model: CausalLM) -> None:
    sampler = RecordingSampler(model, 8)
    driver = StepDriver(model, seed=3, sampler=sampler)
    driver.admit(2, [1, 2, 3])
    driver.sample({2: 3})
    driver.admit(2, [7, 8, 9, 10], num_prompt_tokens=3)  # replaces what was there
    driver.sample({2: 4})
    assert sampler.calls == [
        ("add", 2, [1, 2, 3], []),
        ("remove", 2),
        ("add", 2, [7, 8, 9], [10]),
    ]


def test_a_chunk_that_ends_before_the_prompt_samples_nothing(folder: Path, model: CausalLM) -> None:
    driver = StepDriver(model, seed=4)
    prompt = list(range(20, 37))
    driver.admit(0, prompt)
    assert driver.sample({0: 9}).tokens == [[]]
    assert driver.sample({0: 7}).tokens == [[]]
    assert driver.sample({0: 1}).tokens == [_greedy(folder, prompt, 1)]


def test_preemption_repeats_nothing_and_forgets_nothing(folder: Path, model: CausalLM) -> None:
    driver = StepDriver(model, seed=5)
    prompt = [9, 8, 7, 6, 5, 4]
    driver.admit(0, prompt)
    driver.sample({0: 6})
    driver.sample({0: 1})
    known = driver.tokens[0]
    driver.release(0)
    driver.admit(1, [1] * 11)
    driver.sample({1: 11})
    driver.admit(0, known, num_prompt_tokens=6)
    driver.sample({0: 5, 1: 1})
    driver.sample({1: 1, 0: 3})
    driver.sample({0: 1})
    assert driver.tokens[0][6:] == _greedy(folder, prompt, 4)


def test_a_seeded_row_draws_the_same_in_any_company(model: CausalLM) -> None:
    drawing = SamplingParams(max_tokens=64, temperature=1.5, seed=77, ignore_eos=True)
    outputs = []
    for company in (0, 3):
        driver = StepDriver(model, seed=6)
        driver.admit(0, [4, 5, 6], params=drawing)
        for row in range(1, company + 1):
            driver.admit(row, [row] * 5, params=msgspec.structs.replace(drawing, seed=row))
        driver.sample({row: len(driver.tokens[row]) for row in reversed(driver.tokens)})
        for _ in range(5):
            driver.sample(dict.fromkeys(driver.tokens, 1))
        outputs.append(driver.tokens[0][3:])
    assert outputs[0] == outputs[1]


# ---- numbers that are not -----------------------------------------------------------------------


def test_a_broken_row_gets_no_token_and_spoils_no_other(
    poisoned: tuple[Path, CausalLM],
) -> None:
    folder, model = poisoned
    driver = StepDriver(model, seed=7)
    driver.admit(0, [3, 4, POISON])
    driver.admit(1, [5, 6, 7])
    driver.admit(2, [POISON])
    result = driver.sample({0: 3, 1: 3, 2: 1})
    assert result.is_finite == [False, True, False]
    assert result.tokens == [[], _greedy(folder, [5, 6, 7], 1), []]
    driver.release(0)
    driver.release(2)
    driver.sample({1: 1})
    assert driver.tokens[1][3:] == _greedy(folder, [5, 6, 7], 2)


def test_a_break_early_in_a_chunk_is_seen_though_its_last_logits_are_sound(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward

    def break_third_token(*args: Any, checks_finite: bool = False) -> ForwardResult:
        result = forward(*args, checks_finite=checks_finite)
        if result.is_finite is not None:
            result.is_finite[2] = False
        return result

    monkeypatch.setattr(model, "forward", break_third_token)
    driver = StepDriver(model, seed=8)
    driver.admit(1, list(range(10, 21)))
    result = driver.sample({1: 11})
    assert (result.is_finite, result.tokens) == ([False], [[]])
    driver.admit(2, list(range(10, 21)))
    driver.admit(3, [5])
    # Row 2 has no logits at all in this step; in the batch row 3's one token comes first.
    result = driver.sample({2: 4, 3: 1})
    assert (result.is_finite, [len(t) for t in result.tokens]) == ([False, True], [0, 1])


def test_zeroed_blocks_of_a_broken_row_are_clean_for_the_next_one(
    poisoned: tuple[Path, CausalLM],
) -> None:
    folder, model = poisoned
    driver = StepDriver(model, seed=9, num_blocks=5)
    driver.admit(0, [POISON] * 20)
    assert driver.sample({0: 20}).is_finite == [False]
    assert not driver.executor.kv_store.tensor.isfinite().any()
    driver.release(0, zeroes_blocks=True)
    driver.admit(1, [9, 8, 7])
    driver.admit(2, [6, 5, 4, 3, 2])
    driver.logits({1: 2, 2: 4})
    ours = driver.logits({1: 1, 2: 1})
    for row in (1, 2):
        theirs = reference_logits(folder, driver.tokens[row])[-1:]
        assert_same_logits(ours[row], theirs)


def test_the_sampler_may_declare_a_row_broken_too(model: CausalLM) -> None:
    class Refusing(RecordingSampler):
        def is_plain(self, rows: list[int]) -> bool:
            return False

        def sample(
            self, logits: torch.Tensor, rows: list[int], greedy: GreedyChoice | None = None
        ) -> SampledTensors:
            is_finite = torch.tensor([row != 1 for row in rows])
            return msgspec.structs.replace(
                super().sample(logits, rows, greedy), is_finite=is_finite
            )

    driver = StepDriver(model, seed=10, sampler=Refusing(model, 8))
    driver.admit(0, [4])
    driver.admit(1, [5])
    result = driver.sample({1: 1, 0: 1})
    assert result.is_finite == [False, True]
    assert [len(tokens) for tokens in result.tokens] == [0, 1]


# ---- plans that would touch what is not theirs --------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_new_tokens": [4]}, "know \\[3\\]"),
        ({"num_computed_tokens": [-1]}, "after \\[-1\\]"),
        ({"num_new_tokens": [0], "num_samples": [0]}, "compute \\[0\\]"),
        ({"new_block_ids": [[]]}, "blocks for \\[0\\]"),
        ({"new_block_ids": [[500]]}, "store of 128"),
        ({"rows": [1]}, "know \\[0\\]"),
        ({"num_samples": [4]}, "samples \\[4\\]"),
        ({"num_new_tokens": [2]}, "samples before its last known token"),
        ({"released_rows": [5]}, "row 5 is free"),
    ],
)
def test_a_plan_that_breaks_an_invariant_is_refused(
    change: dict[str, object], problem: str, model: CausalLM
) -> None:
    driver = StepDriver(model, seed=13)
    driver.admit(0, [4, 5, 6])
    plan = msgspec.structs.replace(driver.plan({0: 3}, samples=True), **change)
    before = driver.executor.kv_store.tensor.clone()
    with pytest.raises(AssertionError, match=problem):
        driver.executor.launch(plan)
    assert torch.equal(driver.executor.kv_store.tensor, before)


def test_a_row_named_twice_is_refused(model: CausalLM) -> None:
    driver = StepDriver(model, seed=14)
    driver.admit(0, [4, 5, 6])
    plan = driver.plan({0: 3}, samples=True)
    twice = msgspec.structs.replace(
        plan,
        rows=[0, 0],
        num_new_tokens=[1, 1],
        num_computed_tokens=[0, 1],
        num_samples=[0, 0],
        new_block_ids=[plan.new_block_ids[0], []],
    )
    with pytest.raises(AssertionError, match="a row twice"):
        driver.executor.launch(twice)


def test_no_token_fits_behind_a_full_context(model: CausalLM) -> None:
    driver = StepDriver(model, seed=15)
    driver.admit(0, [1] * 256)
    with pytest.raises(AssertionError, match="no room for a token after \\[256\\] of 256"):
        driver.sample({0: 256})
