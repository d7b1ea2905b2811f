"""Embeddings on a GPU: with graphs and without, against transformers in fp32."""

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.engine import Engine
from engine.request import SamplingParams
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import VOCAB_SIZE, reference_embedding, save_embedding_model

pytestmark = pytest.mark.gpu

EMBED = SamplingParams(max_tokens=0, temperature=0.0, wants_embedding=True)
# One token alone is a decode step; 1,024 tokens and more leave out the last layer's other queries.
LENGTHS = (1, 1, 2, 5, 17, 64, 65, 130, 400, 900, 901)
MIN_COSINE = 0.999  # bf16 in three layers
BASE = {"model__device": "cuda", "cache__num_blocks": 600, "scheduler__max_num_seqs": 24}
FORMS: dict[str, dict[str, object]] = {
    "eager": {"execution__cuda_graphs": False},
    "decode": {"laps__enable_batch_prefill_cuda_graph": False},
    "ragged": {"laps__enable_batch_prefill_cuda_graph": True},
    "grid": {
        "laps__batch_prefill_form": "grid",
        "laps__batch_prefill_max_seq_len": 130,
        "laps__batch_prefill_batch_sizes": [1, 3, 24],
        "laps__batch_prefill_seq_lengths": [7, 130],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_embedding_model(
        made,
        seed=5,
        hidden_size=256,
        intermediate_size=208,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    return made


def embed(engine: Engine, prompts: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    vectors = []
    for found in answer(engine, [(prompt, EMBED) for prompt in prompts]):
        (record,) = found.records
        assert record.prompt is not None
        vectors.append(np.frombuffer(record.prompt.embedding, dtype=np.float32))
    return vectors


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [192, 2048])
def test_every_form_of_step_gives_the_embedding_of_the_whole_prompt(
    folder: Path, max_num_batched_tokens: int, overlap: bool
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    rng.shuffle(prompts)
    expected = [reference_embedding(folder, prompt).numpy() for prompt in prompts]
    outcomes = {}
    for form, keys in FORMS.items():
        engine = start_engine(
            **BASE,
            **keys,
            model__path=str(folder),
            model__deterministic=True,
            scheduler__max_num_batched_tokens=max_num_batched_tokens,
            scheduler__overlap=overlap,
        )
        outcomes[form] = embed(engine, prompts) + embed(engine, prompts)  # the second ones cached
        outcomes[form] += embed(engine, [prompts[0]]) + embed(engine, [[7]])  # alone
        assert engine.compilations.names == [], form
        steps = engine.executor.statistics().prompt_steps
        assert (steps is not None and steps.num_replayed > 0) == (form in ("ragged", "grid"))
    for found, whole in zip(outcomes["eager"], expected * 2, strict=False):
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5)
        assert found @ whole / np.linalg.norm(whole) > MIN_COSINE
    for form, outcome in outcomes.items():
        for found, plain in zip(outcome, outcomes["eager"], strict=True):
            assert np.array_equal(found, plain), form


def test_fast_products_and_other_backends_are_close_enough(folder: Path) -> None:
    engine = start_engine(**BASE, model__path=str(folder), scheduler__max_num_batched_tokens=768)
    prompts = [random.choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]
    for found, prompt in zip(embed(engine, prompts), prompts, strict=True):
        whole = reference_embedding(folder, prompt).numpy()
        assert found @ whole / np.linalg.norm(whole) > MIN_COSINE
    assert engine.compilations.names == []
