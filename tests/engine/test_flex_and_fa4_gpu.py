"""FlexAttention and FlashAttention-4 through the whole engine on a GPU; nothing compiles late."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.models.registry import build_model
from engine.request import SamplingParams
from engine.text.tokenizing import load_tokenizer
from kernels.attention.names import AttentionNames
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import VOCAB_SIZE, reference_logits, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEMO_MODEL = Path("demo_model/laps-demo")
# The shipped model is sure of these: its second choices are at least 1.6 nats behind.
DECISIVE = {
    "def add(a, b):\n    return ": "a + b\n\n\ndef",
    "try:\n    import json\nexcept ": "ImportError:\n",
    "with open(path) as f:\n    return ": "f.read()\n\n",
}
BASE = {"model__device": "cuda", "cache__num_blocks": 600, "scheduler__max_num_seqs": 24}
EIGHT = SamplingParams(max_tokens=8, temperature=0.0)


def _answers(engine: Engine) -> list[str]:
    """Of the decisive prompts, together and one by one, twice: then they are in the cache."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    texts = list(DECISIVE)
    found = []
    for _ in range(2):
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        work = [([*ids], EIGHT) for ids in encoded]
        found += [tokenizer.decode(one.tokens) for one in answer(engine, work)]
        found += [tokenizer.decode(answer(engine, [one])[0].tokens) for one in work]
    return found


def _assert_decisive(engine: Engine) -> None:
    expected = [*DECISIVE.values()] * 4
    for text, wanted in zip(_answers(engine), expected, strict=True):
        assert text.startswith(wanted), text


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("graphs", [True, False])
def test_flash_attention_4_gives_the_decisive_tokens(graphs: bool, block_size: int) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    engine = start_engine(
        **{**BASE, "cache__num_blocks": 600 * 16 // block_size + 40},
        model__attention__prefill="flash_attn_4",
        model__attention__decode="triton",
        laps__enable_batch_prefill_cuda_graph=graphs,
        cache__block_size=block_size,
        scheduler__max_num_batched_tokens=192,
    )
    _assert_decisive(engine)
    assert engine.compilations.names == []


@pytest.mark.parametrize("decode", ["triton", "flex"])
def test_flex_gives_the_decisive_tokens_and_compiles_nothing_late(decode: str) -> None:
    from torch._dynamo.utils import counters

    engine = start_engine(
        **BASE,
        model__attention__prefill="flex",
        model__attention__decode=decode,
        scheduler__max_num_batched_tokens=192,
    )
    num_graphs = counters["stats"]["unique_graphs"]
    _assert_decisive(engine)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert engine.compilations.names == []


def test_a_mask_gives_the_tokens_of_the_reference_in_fp32(tmp_path: Path) -> None:
    save_model(
        tmp_path,
        "Qwen3ForCausalLM",
        seed=5,
        hidden_size=256,
        intermediate_size=208,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 400, 130, 64)]
    found = []
    for backend in ("reference", "flex"):
        engine = start_engine(
            **BASE,
            model__path=str(tmp_path),
            model__dtype="float32",
            model__attention__prefill=backend,
            model__attention__decode=backend,
            model__attention__mask="tests.harness.attention_masks:sections_of_forty",
            scheduler__max_num_batched_tokens=192,
        )
        work = [(prompt, EIGHT) for prompt in prompts]
        found += [[one.tokens for one in answer(engine, work)] for _ in range(2)]
    assert found == [found[0]] * 4


@pytest.mark.parametrize("prefill", ["triton", "flex", "flash_attn_4"])
def test_gemma_2_in_bfloat16_is_as_near_as_the_reference_backend(
    prefill: str, tmp_path: Path
) -> None:
    if prefill == "flash_attn_4" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    save_model(
        tmp_path,
        "Gemma2ForCausalLM",
        seed=5,
        dtype=torch.bfloat16,
        hidden_size=272,
        head_dim=256,
        query_pre_attn_scalar=168,
        intermediate_size=528,
        sliding_window=100,
        max_position_embeddings=1024,
    )
    token_ids = [random.Random(9).randrange(VOCAB_SIZE) for _ in range(400)]
    truth = reference_logits(tmp_path, token_ids)
    exact = build_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"))
    reference = AttentionNames(prefill="reference", decode="reference")
    driver = StepDriver(exact, seed=1, attention=reference, num_blocks=400)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits_in_chunks(0, 90).cpu(), truth, label="fp32")
    model = build_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cuda"))
    errors = []
    for names in (reference, AttentionNames(prefill=prefill, decode="reference")):  # type: ignore[arg-type]
        driver = StepDriver(model, seed=1, attention=names, num_blocks=400, block_size=16)
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, 90).float().cpu()
        errors.append(float((ours - truth).pow(2).mean().sqrt()))
    assert errors[1] <= 1.2 * errors[0], errors
