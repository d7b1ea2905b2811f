"""Outputs held to constraints, through a whole engine: what ends by itself is as asked for."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import msgspec
import pytest

from engine.constraints.json_schema import restrict
from engine.engine import Engine
from engine.messages import Submit, decode, encode
from engine.request import (
    Constraint,
    ConstraintKind,
    Request,
    RequestKey,
    RequestSpec,
    SamplingParams,
    Thinking,
)
from engine.scheduling.request_blocks import RequestBlocks
from engine.text.tokenizing import Tokenizing, load_tokenizer
from load_tests.testbed.random_schemas import random_schema
from tests.harness.in_process import Answer, answer, start_engine
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import save_model

MODEL = Path(__file__).parents[2] / "demo_model" / "laps-demo"
BUDGET_TOKENS = 160
PROMPT = "def settings():\n    return "
SEED = seed_of(__name__)


@pytest.fixture(
    scope="module",
    # By day `test_answers_are_the_same_whether_steps_overlap` compares the two.
    params=[pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["in turn", "overlapped"],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    return start_engine(scheduler__overlap=request.param, scheduler__max_num_seqs=64)


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return load_tokenizer(MODEL)


def by_schema(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(restrict(schema, "schema")))


def by_tag(layout: Any) -> Constraint:
    text = json.dumps({"type": "structural_tag", "format": layout})
    return Constraint(ConstraintKind.STRUCTURAL_TAG, text)


def params_of(constraint: Constraint | None, seed: int, **given: Any) -> SamplingParams:
    fields = {"max_tokens": BUDGET_TOKENS, "temperature": 1.0, "seed": seed} | given
    return SamplingParams(**fields, constraint=constraint)


def prompt_of(tokenizing: Tokenizing, text: str = PROMPT) -> list[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=True)
    assert isinstance(ids, list)
    return ids


def text_of(tokenizing: Tokenizing, found: Answer) -> str:
    return tokenizing.decode(found.tokens)


def check_schemas(engine: Engine, tokenizing: Tokenizing, num_schemas: int) -> None:
    """Every answer that stopped is valid, and nearly all stop."""
    draw = random.Random(SEED)
    schemas = [random_schema(draw) for _ in range(num_schemas)]
    requests = [
        (prompt_of(tokenizing), params_of(by_schema(schema), SEED + i))
        for i, schema in enumerate(schemas)
    ]
    num_stopped = 0
    for schema, found in zip(schemas, answer(engine, requests), strict=True):
        if found.finish == "stop":
            num_stopped += 1
            text = text_of(tokenizing, found)
            try:
                checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
                validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
                validator.validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                pytest.fail(f"seed {SEED}: {schema} gave {text!r}: {error}")
    assert num_stopped >= 0.9 * num_schemas, f"seed {SEED}: {num_stopped} of {num_schemas} stopped"


def test_answers_of_fifty_random_schemas_are_valid(engine: Engine, tokenizing: Tokenizing) -> None:
    check_schemas(engine, tokenizing, 50)


@pytest.mark.nightly
def test_answers_of_five_hundred_random_schemas_are_valid(
    engine: Engine, tokenizing: Tokenizing
) -> None:
    check_schemas(engine, tokenizing, 500)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_regexes_choices_and_grammars_hold(
    engine: Engine, tokenizing: Tokenizing, temperature: float
) -> None:
    words = [{"type": "const_string", "value": word} for word in ("red", "gr\u00e9en\n", '"')]
    cases = [
        (Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|c){1,4}"), "[0-9]{3}-(ab|c){1,4}"),
        (Constraint(ConstraintKind.REGEX, "(\u00e9|x)\\.{2}"), "(\u00e9|x)\\.{2}"),
        (by_tag({"type": "or", "elements": words}), 'red|gr\u00e9en\n|"'),
        (Constraint(ConstraintKind.GRAMMAR, 'root ::= "<" b ">"\nb ::= "x" | "yy"'), "<(x|yy)>"),
    ]
    requests = [
        (prompt_of(tokenizing), params_of(constraint, SEED + i, temperature=temperature))
        for i, (constraint, _) in enumerate(cases)
    ]
    for (_, expected), found in zip(cases, answer(engine, requests), strict=True):
        assert found.finish == "stop"
        assert re.fullmatch(expected, text_of(tokenizing, found))


def test_only_what_comes_behind_the_thinking_is_held(
    engine: Engine, tokenizing: Tokenizing
) -> None:
    (newline,) = tokenizing.encode_batch(["\n"], add_special_tokens=False)
    assert isinstance(newline, list)
    (close_id,) = newline  # the model writes it soon, whatever else it writes
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    thinking = Thinking(open_id=close_id + 1, close_id=close_id, is_open=True)
    requests = [
        (prompt_of(tokenizing), params_of(by_schema(schema), SEED + i, thinking=thinking))
        for i in range(24)  # four in ten stop thinking in time
    ]
    num_answers = 0
    for found in answer(engine, requests):
        if found.finish == "stop":
            num_answers += 1
            rest = found.tokens[found.tokens.index(close_id) + 1 :]
            value = json.loads(tokenizing.decode(rest))
            jsonschema.Draft202012Validator(schema).validate(value)
    assert num_answers > 0, f"seed {SEED}: nobody stopped thinking"


def test_max_tokens_cuts_an_answer_that_may_not_end_yet(
    engine: Engine, tokenizing: Tokenizing
) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "[ab]{50,60}")
    params = params_of(constraint, SEED, max_tokens=7)
    (found,) = answer(engine, [(prompt_of(tokenizing), params)])
    assert (found.finish, len(found.tokens)) == ("length", 7)
    assert re.fullmatch("[ab]+", text_of(tokenizing, found))


def test_rows_without_a_constraint_get_the_tokens_they_get_alone(
    engine: Engine, tokenizing: Tokenizing
) -> None:
    free = [
        (prompt_of(tokenizing, text), params_of(None, SEED, max_tokens=30, temperature=warmth))
        for text, warmth in (("import os", 0.0), ("class A:\n", 0.8), ("for i in ", 1.2))
    ]
    held = [
        (prompt_of(tokenizing), params_of(by_schema(random_schema(random.Random(i))), i))
        for i in range(5)
    ]
    alone = [found.tokens for found in answer(engine, free)]
    mixed = answer(engine, [held[0], free[0], *held[1:3], free[1], free[2], *held[3:]])
    assert [mixed[i].tokens for i in (1, 4, 5)] == alone


def test_an_answer_goes_on_elsewhere_from_the_tokens_that_were_emitted(
    engine: Engine, tokenizing: Tokenizing
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["name"],
    }
    params, prompt = params_of(by_schema(schema), SEED), prompt_of(tokenizing)
    (whole,) = answer(engine, [(prompt, params)])
    num_emitted = random.randrange(1, len(whole.tokens))
    submit = Submit(
        spec=RequestSpec(params=params),
        key=RequestKey("f" * 32, 0, 1),
        ingress_id="test",
        token_ids=prompt + whole.tokens[:num_emitted],
        num_prompt_tokens=len(prompt),
    )
    sent = decode(encode(submit), Submit)
    engine.core.scheduler.add(
        Request(
            spec=RequestSpec(params=sent.spec.params),
            key=sent.key,
            ingress_id=sent.ingress_id,
            tokens=list(sent.token_ids),
            num_prompt_tokens=sent.num_prompt_tokens,
            num_emitted_tokens=num_emitted,
            arrival_s=0.0,
        )
    )
    rest: list[int] = []
    while engine.core.has_work:
        rest += [record.token_id for _, record in engine.core.step().tokens]
    assert whole.tokens[:num_emitted] + rest == whole.tokens


def test_preemption_changes_no_answer(tokenizing: Tokenizing) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "([a-z]{3}-[0-9]{2}){12,15}")
    requests = [(prompt_of(tokenizing), params_of(constraint, SEED + i)) for i in range(4)]
    limits = {"cache__block_size": 4, "model__max_model_len": 200}
    roomy, tight = (
        start_engine(scheduler__overlap=True, cache__num_blocks=n, **limits) for n in (400, 50)
    )
    expected = [found.tokens for found in answer(roomy, requests)]
    assert [found.tokens for found in answer(tight, requests)] == expected
    assert tight.core.scheduler.statistics().num_preemptions > 0


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_mixture_holds_its_answers_among_prompts_of_any_length(
    architecture: str, tokenizing: Tokenizing, tmp_path: Path
) -> None:
    """With length-aware scheduling and prompts in chunks: as each request's alone, and as asked."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    save_model(tmp_path, architecture, vocab_size=3072, eos_token_id=1)
    pattern = "[0-9]{3}-(ab|c){1,4}"
    constraint = Constraint(ConstraintKind.REGEX, pattern)
    requests = [
        (prompt_of(tokenizing, PROMPT * repeats), params_of(constraint, SEED + i, max_tokens=40))
        for i, repeats in enumerate((1, 16, 2, 9))
    ]
    engine = start_engine(
        model__path=str(tmp_path),
        model__max_model_len=240,
        laps__queue="laps",
        scheduler__max_num_batched_tokens=32,
        scheduler__max_num_seqs=8,
    )
    alone = [answer(engine, [request])[0].tokens for request in requests]
    together = answer(engine, requests)
    assert [found.tokens for found in together] == alone
    for found in together:
        assert found.finish == "stop"
        assert re.fullmatch(pattern, text_of(tokenizing, found))


def test_answers_are_the_same_whether_steps_overlap(tokenizing: Tokenizing) -> None:
    """A constrained row is planned before its newest token is known, and told of it in time.

    Blocks are so few that rows are preempted, and get their constraints anew.
    """
    prompt, word, draw = prompt_of(tokenizing), prompt_of(tokenizing, "self"), random.Random(SEED)
    limits: list[dict[str, Any]] = [
        {"constraint": Constraint(ConstraintKind.REGEX, "[ab]{3}-[0-9]{2,9}")},
        {"constraint": by_schema(random_schema(draw)), "frequency_penalty": 0.7},
        {"constraint": by_schema(random_schema(draw)), "logprobs": 2},
        {"allowed_token_ids": tuple(draw.sample(range(1, 400), 40)), "max_tokens": 9},
        {
            "banned_sequences": (tuple(word), tuple(prompt[:1])),
            "stop_token_ids": tuple(prompt[1:3]),
        },
        *[{"ignore_eos": True}] * 2,
    ]
    requests = [
        (prompt, SamplingParams(**{"max_tokens": 40, "seed": draw.randrange(999)} | given))
        for given in limits * 2
    ]
    room: dict[str, Any] = {
        "cache__block_size": 4,
        "cache__num_blocks": 20,
        "model__max_model_len": 80,
    }
    found = []
    for overlap in (False, True):
        engine = start_engine(scheduler__overlap=overlap, scheduler__max_num_seqs=5, **room)
        found.append([(one.tokens, one.finish) for one in answer(engine, requests)])
        assert engine.core.scheduler.statistics().num_preemptions > 0, f"seed {SEED}"
    assert found[0] == found[1]


def test_an_answer_that_a_stop_id_ends_where_nothing_may_follow_stays_cached(
    tokenizing: Tokenizing,
) -> None:
    """The step that is then in flight has no token to draw, and its numbers are finite."""
    prompt = prompt_of(tokenizing)
    a, b = (prompt_of(tokenizing, letter)[-1] for letter in "ab")
    params = msgspec.structs.replace(
        params_of(Constraint(ConstraintKind.REGEX, "a{30}b"), SEED),
        allowed_token_ids=(a, b),
        stop_token_ids=(b,),
    )
    engine = start_engine(scheduler__overlap=True, cache__block_size=4)
    with patch.object(RequestBlocks, "set_aside", side_effect=AssertionError("no NaN anywhere")):
        (found,) = answer(engine, [(prompt, params)])
        assert found.tokens[-1] == b
        assert found.finish == "stop"
        answer(engine, [(prompt + found.tokens, SamplingParams(max_tokens=1))])
    num_cached = engine.core.scheduler.statistics().num_cached_tokens
    assert num_cached >= len(prompt) + len(found.tokens) - 5


def test_an_answer_behind_which_nothing_may_follow_fails_with_the_reason(
    tokenizing: Tokenizing,
) -> None:
    prompt = prompt_of(tokenizing)
    a = prompt_of(tokenizing, "a")[-1]
    params = msgspec.structs.replace(
        params_of(Constraint(ConstraintKind.REGEX, "a{9}"), SEED), allowed_token_ids=(a,)
    )
    engine = start_engine(scheduler__overlap=True)
    with pytest.raises(AssertionError, match="the constraint on the output allows no token any"):
        answer(engine, [(prompt, params)])


def test_logprobs_are_the_models_own(engine: Engine, tokenizing: Tokenizing) -> None:
    constraint = by_tag({"type": "const_string", "value": "zz"})
    params = msgspec.structs.replace(params_of(constraint, SEED), logprobs=2, temperature=0.0)
    (found,) = answer(engine, [(prompt_of(tokenizing), params)])
    first = found.records[0].logprobs
    assert first is not None
    assert found.tokens[0] not in first.top_ids
    assert first.chosen < first.top_logprobs[-1]
