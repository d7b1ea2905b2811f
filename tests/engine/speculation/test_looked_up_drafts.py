"""Drafts that the device looks up: the same answers bit by bit, and tokens as often as they should.

On a GPU the kernels do it, before graphs and before steps without; on a CPU plans are made true.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import SamplingParams
from tests.engine.speculation.guessed_engines import Asked, assert_same, run
from tests.harness.in_process import start_engine
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)
# A chi-square of 8 degrees of freedom exceeds it with a probability of 5e-7.
CHI_SQUARE_LIMIT = 44.5
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DECODE = {"speculation__attention_backend": "decode", "model__attention__decode": "triton"}


def _save(folder: Path, device: str) -> torch.nn.Module:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 720,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "dtype": torch.bfloat16,
    }
    given = sizes if device == "cuda" else {}
    return save_model(folder, "Qwen3ForCausalLM", seed=SEED, **given)


def _start(folder: Path, device: str, **settings: object) -> Engine:
    given: dict[str, object] = {
        "model__path": str(folder),
        "model__device": device,
        "cache__num_blocks": 2048,
        "scheduler__overlap": True,
        "scheduler__max_num_seqs": 32,
    }
    return start_engine(**{**given, **settings})


def _looking_up(folder: Path, device: str, **settings: object) -> Engine:
    drafts = {
        "speculation__drafter": "ngram",
        "speculation__ngrams_on_device": True,
        "speculation__max_drafts": 3,
        "speculation__max_temperature": 9.0,
        "speculation__adaptive": False,
    }
    return _start(folder, device, **drafts, **settings)


def _asked() -> list[Asked]:
    draw = random.Random(SEED)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 0},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.9, "min_tokens": 5, "stop_token_ids": tuple(range(0, 99, 9))},
    ]
    return [
        (
            draw.choices(range(3, VOCAB_SIZE), k=draw.choice([3, 15, 16, 70, 100])),
            SamplingParams(
                **kinds[i % len(kinds)], max_tokens=40, ignore_eos=True, seed=draw.getrandbits(60)
            ),
        )
        for i in range(30)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("graph_tokens", [0, 128])
def test_deterministic_answers_are_those_without_drafts(tmp_path: Path, graph_tokens: int) -> None:
    """Three times: then drafts are of finished answers, quoted to the device, and mostly right."""
    print("seed", SEED)
    _save(tmp_path, "cuda")
    asked = _asked()
    expected = run(_start(tmp_path, "cuda", model__deterministic=True), asked)
    engine = _looking_up(
        tmp_path,
        "cuda",
        model__deterministic=True,
        speculation__max_graph_tokens=graph_tokens,
    )
    for _ in range(3):
        assert_same(run(engine, asked), expected)
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted > 800


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_tokens_come_as_often_as_the_model_says(tmp_path: Path, device: str) -> None:
    """Three tokens to choose from, in texts that have had every pair of them: each has drafts."""
    print("seed", SEED)
    oracle = _save(tmp_path, device).float()
    draw = random.Random(SEED)
    chosen, num_tokens = (11, 12, 13), 6
    prompt = [token for pair in product(chosen, chosen) for token in pair]
    settings = {**DECODE, "speculation__max_graph_tokens": 128} if device == "cuda" else {}
    engine = _looking_up(tmp_path, device, **settings)
    num_requests = 2000 if device == "cuda" else 600
    asked = [
        (
            prompt,
            SamplingParams(
                max_tokens=num_tokens,
                temperature=4.0,
                ignore_eos=True,
                seed=draw.getrandbits(60),
                logit_bias=dict.fromkeys(chosen, 60.0),
            ),
        )
        for _ in range(num_requests)
    ]
    counts = dict.fromkeys(product(chosen, chosen), 0)
    for found in run(engine, asked):
        counts[found.tokens[-2], found.tokens[-1]] += 1
    sequences = list(product(chosen, repeat=num_tokens))
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *tokens] for tokens in sequences])).logits
    shares = torch.log_softmax(logits[:, len(prompt) - 1 : -1, list(chosen)].double() / 4.0, -1)
    drawn = torch.tensor(sequences)[:, :, None] - chosen[0]
    likely = shares.gather(2, drawn).sum((1, 2)).exp() * num_requests
    expected = dict.fromkeys(counts, 0.0)
    for tokens, number in zip(sequences, likely.tolist(), strict=True):
        expected[tokens[-2], tokens[-1]] += number
    assert min(expected.values()) > 10
    drafts = engine.core.scheduler.drafting.counts
    assert 0 < drafts.num_accepted < drafts.num_drafted
    chi_square = sum((counts[k] - expected[k]) ** 2 / expected[k] for k in counts)
    assert chi_square < CHI_SQUARE_LIMIT, f"{counts} for {expected}"
