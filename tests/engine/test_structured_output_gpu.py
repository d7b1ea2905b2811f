"""Constrained outputs on a GPU: the tokens of a CPU in fp32, valid JSON in bf16, no late kernel."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.constraints.json_schema import restrict
from engine.engine import Engine
from engine.request import Constraint, ConstraintKind, SamplingParams
from engine.text.tokenizing import load_tokenizer
from load_tests.testbed.random_schemas import random_schema
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import seed_of

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "demo_model" / "laps-demo"
REFERENCE = {"model__attention__prefill": "reference", "model__attention__decode": "reference"}
SEED = seed_of(__name__)

Work = list[tuple[list[int], SamplingParams]]


def held_work(schemas: list[dict[str, Any]], temperature: float) -> Work:
    """Every second request is free."""
    (prompt,) = load_tokenizer(MODEL).encode_batch(["x = "], add_special_tokens=True)
    assert isinstance(prompt, list)
    work: Work = []
    for number, schema in enumerate(schemas):
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(restrict(schema, "schema")))
        for held in (constraint, None):
            params = SamplingParams(
                max_tokens=160, temperature=temperature, seed=SEED + number, constraint=held
            )
            work.append((prompt, params))
    return work


def run(engine: Engine, work: Work) -> list[tuple[list[int], str | None]]:
    for _, params in work:
        if params.constraint is not None:
            engine.grammars.prepare(params.constraint).result()
    return [(found.tokens, found.finish) for found in answer(engine, work)]


def test_held_rows_get_a_cpus_tokens_in_fp32() -> None:
    draw = random.Random(SEED)
    work = held_work([random_schema(draw) for _ in range(24)], temperature=0.0)
    engines = (
        start_engine(scheduler__max_num_seqs=32),
        start_engine(
            model__device="cuda", model__dtype="float32", scheduler__max_num_seqs=32, **REFERENCE
        ),
    )
    on_cpu, on_gpu = (run(engine, work) for engine in engines)
    # Two logits within a rounding error of each other may change places; an answer goes on from it.
    num_different = sum(a != b for a, b in zip(on_cpu, on_gpu, strict=True))
    assert num_different <= 2, f"seed {SEED}: {num_different} of {len(work)} answers differ"


@pytest.mark.parametrize("overlap", [False, True])
def test_held_rows_are_valid_in_bf16_and_compile_nothing_late(overlap: bool) -> None:
    draw = random.Random(SEED)
    schemas = [random_schema(draw) for _ in range(60)]
    engine = start_engine(
        model__device="cuda",
        model__dtype="bfloat16",
        scheduler__overlap=overlap,
        scheduler__max_num_seqs=48,
        cache__num_blocks=4000,  # however much of the GPU others have
    )
    tokenizing = load_tokenizer(MODEL)
    found = run(engine, held_work(schemas, temperature=1.0))[::2]
    num_stopped = 0
    for schema, (tokens, finish) in zip(schemas, found, strict=True):
        if finish == "stop":
            num_stopped += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizing.decode(tokens)))
    assert num_stopped >= 0.9 * len(schemas), f"seed {SEED}: {num_stopped} stopped"
    assert engine.compilations.names == []
