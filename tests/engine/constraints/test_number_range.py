"""Numbers held to bounds: what the compiled grammar takes is exactly what is within them."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from engine.constraints.compiling import compile_constraint
from engine.constraints.json_schema import restrict
from engine.constraints.number_range import MAX_BOUND
from engine.request import Constraint, ConstraintKind

END = 256
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*(bytes([byte]) for byte in range(END)), b""], stop_token_ids=[END]),
    max_threads=1,
    cache_enabled=False,
)
FAR = st.integers(-MAX_BOUND, MAX_BOUND) | st.integers(-2000, 2000)
STEPS = [Decimal(1).scaleb(-places) for places in range(6)]


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    text = str(msgspec.json.encode(restrict(schema, "schema")), "utf-8")
    return compile_constraint(COMPILER, Constraint(ConstraintKind.JSON_SCHEMA, text))


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(END)


def around(bound: int) -> Iterator[int]:
    """Itself, and what has its first digits."""
    for size in (10**place for place in range(15)):
        for value in (bound // size * size + more for more in (-size, -1, 0, 1, size)):
            if abs(value) <= MAX_BOUND:
                yield value


@given(FAR, FAR, st.integers(-MAX_BOUND, MAX_BOUND))
def test_an_integers_bounds_are_kept_exactly(one: int, other: int, any_value: int) -> None:
    low, high = sorted((one, other))
    grammar = compiled({"type": "integer", "minimum": low, "exclusiveMaximum": high + 1})
    for value in {*around(low), *around(high), *around(0), any_value, (low + high) // 2}:
        assert takes(grammar, str(value)) == (low <= value <= high), value


@given(
    st.decimals(-1000, 1000, places=3),
    st.decimals(1, 1000, places=2),
    st.booleans(),
    st.booleans(),
    st.decimals(-1000, 1000, places=4),
)
def test_a_numbers_bounds_are_kept_exactly(
    low: Decimal, width: Decimal, has_low: bool, has_high: bool, any_value: Decimal
) -> None:
    high = low + width
    schema = {"type": "number", "minimum": float(low), "maximum": float(high)}
    if not has_low:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    if not has_high:
        schema["exclusiveMaximum"] = schema.pop("maximum")
    grammar = compiled(schema)
    values = [bound + sign * step for bound in (low, high) for step in STEPS for sign in (-1, 0, 1)]
    for value in [*values, any_value, low + width / 2]:
        is_within = (low < value or (has_low and low == value)) and (
            value < high or (has_high and value == high)
        )
        if value != 0:  # which has many names here: 0E-4, -0.000
            assert takes(grammar, f"{value:f}") == is_within, value


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 0},
        {"maximum": 68},
        {"exclusiveMinimum": 0, "maximum": 2**31 - 1},
        {"minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        {"minimum": -888_888_888_888_888, "maximum": 888_888_888_888_888},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_cost_little(kind: str, bounds: dict[str, int]) -> None:
    named = {f"key_{number}": {"type": kind, **bounds} for number in range(8)}
    grammar = compiled({"properties": named, "required": list(named)})
    assert grammar.memory_size_bytes < 16 * 2**20


def test_bounds_hold_wherever_a_number_stands() -> None:
    small = {"type": "integer", "minimum": 3, "maximum": 5}
    schema = {
        "$defs": {"small": small},
        "properties": {
            "range0": {"type": "array", "items": {"$ref": "#/$defs/small"}},
            "b": {
                "anyOf": [{"type": "number", "maximum": -1}, {"enum": ["range1", {"minimum": 9}]}]
            },
        },
        "required": ["range0", "b"],
    }
    grammar = compiled(schema)
    for text in ('[3, 5], "b": -1.5', '[], "b": "range1"', '[4], "b": {"minimum":9}'):
        assert takes(grammar, f'{{"range0": {text}}}'), text
    for text in ('[2], "b": -1', '[6], "b": -2', '[3], "b": -0.5', '[33], "b": "range_1"'):
        assert not takes(grammar, f'{{"range0": {text}}}'), text


def test_a_bound_out_of_reach_bounds_as_far_as_numbers_go() -> None:
    grammar = compiled({"type": "integer", "minimum": -(2**63), "maximum": 1e300})
    assert takes(grammar, str(MAX_BOUND))
    assert takes(grammar, str(-MAX_BOUND))
    assert not takes(grammar, str(MAX_BOUND + 1))


def test_the_arguments_of_a_tool_have_their_bounds_too() -> None:
    arguments = restrict({"properties": {"n": {"type": "integer", "minimum": 7}}}, "tools")
    content = {"type": "json_schema", "json_schema": arguments}
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    layout = {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": True}
    text = str(msgspec.json.encode({"type": "structural_tag", "format": layout}), "utf-8")
    grammar = compile_constraint(COMPILER, Constraint(ConstraintKind.STRUCTURAL_TAG, text))
    assert takes(grammar, '<{"n": 7}>,<{}>')
    assert not takes(grammar, '<{"n": 6}>')
