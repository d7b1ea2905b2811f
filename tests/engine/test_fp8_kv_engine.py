"""Engines on a CPU that keep K and V as e4m3 numbers, beside transformers with a cache of the same.

Scales are random and coarse: what is stored differs so much from what was computed that an engine
that forgot to round, or took another head's scale, would answer something else.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from configs.errors import ConfigFileError
from configs.load import load_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.cache import check_blocks
from engine.kv_calibration import largest_numbers, scales_for
from engine.models.kv_scales import write_kv_scales
from engine.models.registry import build_model
from engine.text.tokenizing import load_tokenizer
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import DEEPSEEKS, reference_logits, save_model

MODEL = Path("demo_model/laps-demo")
TEXTS = (
    "def settings():\n    return ",
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
    "class Worker:\n    def __init__(self, name, address, port):\n        self.name = name\n" * 3,
    "for i in range(10):\n    print(i",
)
TIGHT = {"scheduler__max_num_batched_tokens": 16, "scheduler__max_num_seqs": 3}
# Of a token's score below the best one's, in standard deviations of its position's scores: sums in
# another order may move a number to its neighbour.
MAX_GAP = 0.1


def _draw_scales(path: Path, layers: int, heads: int, *, is_latent: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    scales = 100 * 10 ** torch.rand((layers, 2, heads), generator=generator)
    write_kv_scales(path, scales, is_latent=is_latent)
    return scales


class RoundedCache(DynamicCache):
    """transformers' cache, which keeps and returns what e4m3 numbers of `scales` stand for.

    Of latent attention it has latents as keys and rotated keys as values.
    """

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = []
        for x, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True):
            factor = scale[None, :, None, None]
            numbers = (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            rounded.append(numbers.float() * factor)
        return super().update(*rounded, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]


def _gaps(model: PreTrainedModel, cache: DynamicCache, prompt: list[int], out: list[int]) -> Tensor:
    """How far each token of an answer is below the best one, in standard deviations."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + out[:-1]]), past_key_values=cache).logits[0]
    scores = logits[len(prompt) - 1 :]
    chosen = scores.gather(1, torch.tensor(out)[:, None])[:, 0]
    return (scores.amax(1) - chosen) / scores.std(dim=1)


def _check_answers(
    engine: Engine, model: PreTrainedModel, scales: Tensor, prompts: Sequence[list[int]]
) -> None:
    answers = [found.tokens for found in answer(engine, [(p, GREEDY) for p in prompts])]
    pairs = list(zip(prompts, answers, strict=True))
    gaps = torch.cat([_gaps(model, RoundedCache(scales), *pair) for pair in pairs])
    assert gaps.max() <= MAX_GAP
    assert (gaps > 0).float().mean() <= 0.05
    unrounded = torch.cat([_gaps(model, DynamicCache(), *pair) for pair in pairs])
    assert unrounded.max() > 2 * MAX_GAP, "these scales change nothing: the check shows nothing"


def _prompts() -> list[list[int]]:
    found = load_tokenizer(MODEL).encode_batch(list(TEXTS), add_special_tokens=True)
    return [list(ids) for ids in found]


def test_answers_are_those_of_a_cache_with_the_same_numbers(tmp_path: Path) -> None:
    """In chunks, in batches; and again from the prefix cache."""
    scales = _draw_scales(tmp_path / "s.safetensors", 6, 2)
    engine = start_engine(
        cache__kv_dtype="fp8_e4m3", cache__kv_scales=str(tmp_path / "s.safetensors"), **TIGHT
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for _ in range(2):
        _check_answers(engine, model, scales, _prompts())


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", *DEEPSEEKS]
)
def test_families_with_norms_windows_sinks_and_latents(architecture: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, architecture, seed=3)
    layers, is_latent = model.config.num_hidden_layers, architecture in DEEPSEEKS
    heads = 1 if is_latent else 2
    scales = _draw_scales(tmp_path / "s.safetensors", layers, heads, is_latent=is_latent)
    engine = start_engine(
        model__path=str(tmp_path),
        cache__kv_dtype="fp8_e4m3",
        cache__kv_scales=str(tmp_path / "s.safetensors"),
        **TIGHT,
    )
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 130, (n,), generator=generator).tolist() for n in (1, 9, 40, 23)]
    _check_answers(engine, model, scales, prompts)


@pytest.mark.parametrize("architecture", DEEPSEEKS)
def test_latents_with_scales_that_were_found_are_near_the_model(
    architecture: str, tmp_path: Path
) -> None:
    """All experts are active: a rounded router may choose others, and then no distance counts."""
    experts = DEEPSEEKS[architecture]["n_routed_experts"]
    settings = {"num_experts_per_tok": experts, "n_group": 1, "topk_group": 1}
    save_model(tmp_path, architecture, seed=3, **settings)
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(3, 130, (60,), generator=generator).tolist()
    scales = scales_for(largest_numbers(tmp_path, [token_ids], "cpu"), 2.0)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    theirs = reference_logits(tmp_path, token_ids)
    errors = []
    for coarser in (1.0, 30_000.0):
        driver = StepDriver(model, seed=0, kv_scales=coarser * scales)
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, 23)
        errors.append(float((ours - theirs).norm() / theirs.norm()))
    assert errors[0] < 0.1, errors
    assert errors[1] > 3 * errors[0], errors


def test_half_the_bytes_a_block_and_the_same_answers_from_a_crowded_cache() -> None:
    """Preempted, evicted to host memory and guessed at: the tokens of an engine with room."""
    prompts = [ids * 3 for ids in _prompts()]
    plain, roomy = start_engine(), start_engine(cache__kv_dtype="fp8_e4m3")
    assert 4 * roomy.layout.block_bytes == plain.layout.block_bytes  # it computes in fp32
    expected = [found.tokens for found in answer(roomy, [(p, GREEDY) for p in prompts])]
    crowded = start_engine(
        cache__kv_dtype="fp8_e4m3",
        cache__num_blocks=22,
        cache__host_gib=0.01,
        model__max_model_len=300,
        speculation__drafter="ngram",
        **TIGHT,
    )
    try:
        for _ in range(2):
            found = answer(crowded, [(p, GREEDY) for p in prompts])
            assert [one.tokens for one in found] == expected
        check_blocks(crowded.cache, crowded.core.scheduler.owners())
        load = crowded.load()
        assert load.host_tier is not None
        assert load.host_tier.block_bytes == roomy.layout.block_bytes
        assert load.host_tier.num_stored > 0
        assert load.speculation is not None
        assert load.speculation.num_accepted > 0
    finally:
        crowded.close()


def test_a_draft_model_keeps_its_own_numbers(tmp_path: Path) -> None:
    """The draft's K and V are e4m3 numbers too, of its own scales."""
    prompts = [(p, GREEDY) for p in _prompts()]
    expected = [found.tokens for found in answer(start_engine(cache__kv_dtype="fp8_e4m3"), prompts)]
    guessing = start_engine(
        cache__kv_dtype="fp8_e4m3",
        speculation__drafter="draft_model",
        speculation__model_path="demo_model/laps-demo-draft",
        speculation__attention_backend="decode",
    )
    assert [found.tokens for found in answer(guessing, prompts)] == expected
    guesses = guessing.load().speculation
    assert guesses is not None
    assert guesses.num_accepted > 0


# ---- refusals ------------------------------------------------------------------------------------


def test_blocks_that_no_digest_divides_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "DeepseekV2ForCausalLM", num_hidden_layers=1, kv_lora_rank=42)
    sizes = {"cache__num_blocks": 64, "model__max_model_len": 32}
    with pytest.raises(ConfigError, match=r"cache\.block_size: blocks of 150 bytes.*multiple of 4"):
        start_engine(
            model__path=str(tmp_path), cache__kv_dtype="fp8_e4m3", cache__block_size=3, **sizes
        )


def _raises(**overrides: object) -> Callable[[], object]:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return lambda: load_config(None, dotted)


def test_scales_without_numbers_and_other_numbers_are_refused() -> None:
    with pytest.raises(ConfigFileError, match=r"cache\.kv_scales: needs cache\.kv_dtype fp8_e4m3"):
        _raises(cache__kv_scales="s.safetensors")()
    with pytest.raises(ConfigFileError, match=r"cache\.kv_dtype: .*auto.*fp8_e4m3"):
        _raises(cache__kv_dtype="fp8_e5m2")()
