"""Drafts for the shipped model and its shipped draft: text, structured output, distribution."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.request import Constraint, ConstraintKind, SamplingParams
from engine.text.tokenizing import load_tokenizer
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import save_model

MODELS = Path(__file__).parents[3] / "demo_model"
NGRAM = {"speculation__drafter": "ngram"}
DRAFT = {
    "speculation__drafter": "draft_model",
    "speculation__model_path": str(MODELS / "laps-demo-draft"),
}
TEXTS = (
    "def settings():\n    return ",
    "for i in range(10):\n    print(i",
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
)
# A chi-square of 8 degrees of freedom exceeds it with a probability of 5e-7.
CHI_SQUARE_LIMIT = 44.5


def _start(**settings: object) -> Engine:
    fixed = {"speculation__adaptive": False, "speculation__max_temperature": 9.0}
    return start_engine(cache__num_blocks=512, **fixed, **settings)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found = load_tokenizer(MODELS / "laps-demo").encode_batch(list(TEXTS), add_special_tokens=True)
    return [list(ids) for ids in found]


@pytest.mark.parametrize(
    "drafts",
    [pytest.param(NGRAM, marks=pytest.mark.nightly), DRAFT],
    ids=["ngram", "draft model"],
)
def test_greedy_text_is_that_of_transformers(
    prompts: list[list[int]], drafts: dict[str, object]
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(MODELS / "laps-demo", dtype=torch.float32)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    engine = _start(**drafts)
    found = answer(engine, [(prompt, params) for prompt in prompts])
    for prompt, ours in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *ours.tokens]])).logits[0]
        assert ours.tokens == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert engine.core.scheduler.drafting.counts.num_accepted > 20


@pytest.mark.parametrize(
    "drafts",
    [NGRAM, pytest.param(DRAFT, marks=pytest.mark.nightly)],
    ids=["ngram", "draft model"],
)
def test_structured_output_is_that_without_drafts(
    prompts: list[list[int]], drafts: dict[str, object]
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["first", "second"]}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    constraints = [
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
        Constraint(ConstraintKind.REGEX, "(ab|cd){8}-[0-9]{4}"),
    ]
    asked = [
        (prompt, SamplingParams(max_tokens=48, temperature=t, seed=i, constraint=constraint))
        for i, (prompt, constraint) in enumerate(product(prompts, constraints))
        for t in (0.0, 0.9)
    ]
    expected = answer(start_engine(cache__num_blocks=512), asked)
    engine = _start(**drafts)
    for _ in range(2):
        found = answer(engine, asked)
        assert [f.tokens for f in found] == [e.tokens for e in expected]
        assert [f.finish for f in found] == [e.finish for e in expected]
    assert sum(found.finish == "stop" for found in expected) > 5
    assert engine.core.scheduler.drafting.counts.num_accepted > 50


@pytest.mark.parametrize("backend", ["prefill", pytest.param("decode", marks=pytest.mark.nightly)])
def test_tokens_come_as_often_as_the_model_says(tmp_path: Path, backend: str) -> None:
    """A draft model that is often wrong, three tokens to choose from, and all pairs of them."""
    oracle = save_model(tmp_path / "target", seed=3)
    save_model(tmp_path / "draft", seed=4, num_hidden_layers=1)
    chosen, prompt, num_requests = (11, 12, 13), [5, 6, 7, 8], 1500
    engine = _start(
        model__path=str(tmp_path / "target"),
        speculation__drafter="draft_model",
        speculation__model_path=str(tmp_path / "draft"),
        speculation__attention_backend=backend,
        scheduler__max_num_seqs=64,
    )
    params = {"max_tokens": 3, "temperature": 1.6, "ignore_eos": True}
    asked = [
        (prompt, SamplingParams(**params, seed=seed, allowed_token_ids=chosen))
        for seed in range(num_requests)
    ]
    counts = dict.fromkeys(product(chosen, chosen), 0)
    for found in answer(engine, asked):
        counts[found.tokens[1], found.tokens[2]] += 1

    def shares(*context: int) -> dict[int, float]:
        logits = oracle(torch.tensor([[*prompt, *context]])).logits[0, -1, list(chosen)]
        return dict(zip(chosen, torch.softmax(logits / 1.6, 0).tolist(), strict=True))

    with torch.no_grad():
        first = shares()
        expected = {
            (b, c): num_requests * sum(first[a] * shares(a)[b] * shares(a, b)[c] for a in chosen)
            for b, c in counts
        }
    assert min(expected.values()) > 10
    drafts = engine.core.scheduler.drafting.counts
    assert 0 < drafts.num_accepted < drafts.num_drafted
    chi_square = sum((counts[k] - expected[k]) ** 2 / expected[k] for k in counts)
    assert chi_square < CHI_SQUARE_LIMIT, f"{counts} for {expected}"
