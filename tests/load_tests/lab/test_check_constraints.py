"""The check of constrained outputs: its oracle, its schemas, and what it makes of wrong ones."""

import random
from pathlib import Path

import jsonschema
import pytest
from jsonschema.validators import validator_for

from configs.load import load_config
from engine.constraints.json_schema import restrict
from engine.text.tokenizing import load_tokenizer
from load_tests.lab.bench_constrained import write_vocabulary
from load_tests.lab.check_constraints import DEMO_MODEL, ConstraintRun, draw_schemas
from load_tests.testbed.json_oracle import find_problem
from load_tests.testbed.random_schemas import SchemaKind, wrong_schemas

ALL_KINDS = list(SchemaKind)


def test_the_oracle_tells_valid_outputs_from_others() -> None:
    schema = {"type": "string", "format": "date"}
    assert find_problem(schema, '"2024-02-29"') is None
    for text in ('"2023-02-29"', "7", '"', ""):
        assert find_problem(schema, text) is not None


def test_schemas_are_schemas_and_the_same_for_a_seed() -> None:
    seed = random.randrange(10**6)
    drawn = draw_schemas(ALL_KINDS, 80, seed)
    assert drawn == draw_schemas(ALL_KINDS, 80, seed)
    for kind, schema in drawn:
        if kind is not SchemaKind.ADVERSARIAL:  # some of its patterns are none
            newest = jsonschema.Draft202012Validator
            validator_for(schema, default=newest).check_schema(schema)
        if kind in (SchemaKind.BOUNDED, SchemaKind.RECURSIVE, SchemaKind.OPEN):
            restrict(schema, "schema")
    assert len(wrong_schemas(random.Random(seed))) > 3


def test_a_vocabulary_of_source_text_has_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    size = random.randrange(500, 900)
    write_vocabulary(tmp_path, size, seed=1)
    tokenizing = load_tokenizer(tmp_path)
    assert tokenizing.vocab_size == size
    assert all(tokenizing.piece(token_id) for token_id in range(size))


@pytest.mark.slow
def test_a_run_refuses_wrong_schemas_and_finds_the_others_outputs_valid() -> None:
    config = load_config(None, {"model.path": str(DEMO_MODEL), "scheduler.max_num_seqs": 16})
    run = ConstraintRun(config, max_tokens=160, seed=random.randrange(10**6))
    kinds = [SchemaKind.BOUNDED, SchemaKind.RECURSIVE, SchemaKind.OPEN]
    wrong = [(SchemaKind.WRONG, {"type": "integer", "minimum": 2, "maximum": 1})]
    try:
        report = run.run(draw_schemas(kinds, 18, random.randrange(10**6)) + wrong)
    finally:
        run.close()
    assert report.is_met, report.render()
    refused = report.tallies[SchemaKind.WRONG].refusals
    assert refused == {"no value can satisfy it.": 1}
    assert "bounded" in report.render()
