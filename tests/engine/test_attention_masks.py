"""A mask function of the configuration, and FlexAttention, through the whole engine on a CPU."""

import random
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import VOCAB_SIZE, save_model

MASKS = "tests.harness.attention_masks"
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_model(made, "Qwen3ForCausalLM", seed=5, dtype=torch.float32, **sizes)
    return made


def _start(folder: Path, backend: str, mask: str | None, **overrides: object) -> Engine:
    return start_engine(
        model__path=str(folder),
        model__attention__prefill=backend,
        model__attention__decode=backend,
        model__attention__mask=mask,
        **overrides,
    )


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 90, 37)]


def _tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [found.tokens for found in answer(engine, [(prompt, SHORT) for prompt in prompts])]


@pytest.mark.parametrize(
    "mask", [pytest.param(None, marks=pytest.mark.nightly), f"{MASKS}:sections_of_forty"]
)
def test_flex_gives_the_tokens_of_the_reference(folder: Path, mask: str | None) -> None:
    """In chunks, together, and again behind blocks that were found in the prefix cache."""
    prompts = _prompts(fresh_seed())
    expected = _tokens(_start(folder, "reference", mask), prompts)
    engine = _start(
        folder, "flex", mask, scheduler__max_num_batched_tokens=40, scheduler__max_num_seqs=8
    )
    assert _tokens(engine, prompts) == expected
    assert _tokens(engine, prompts) == expected


def test_a_mask_changes_what_is_computed(folder: Path) -> None:
    engines = [_start(folder, "reference", mask) for mask in (None, f"{MASKS}:sections_of_forty")]
    one, other = (_tokens(engine, _prompts(3) * 4) for engine in engines)
    assert one != other


def test_a_mask_that_is_none_ends_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention: mask .*:blind: .*position 100"):
        _start(folder, "reference", f"{MASKS}:blind")


def test_other_backends_refuse_a_mask(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"triton .*not the mask .*for prefill: flex, reference"):
        _start(folder, "triton", f"{MASKS}:near_and_even")
