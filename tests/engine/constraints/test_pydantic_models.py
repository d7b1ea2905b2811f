"""Schemas that pydantic writes for common types of fields: held, and what is drawn is read back."""

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar
from uuid import UUID

import pytest
from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    NonNegativeInt,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
    confloat,
    conint,
    conlist,
    constr,
    create_model,
)
from typing_extensions import TypedDict

from engine.constraints.json_schema import restrict
from engine.errors import RequestError
from load_tests.testbed.json_oracle import find_problem
from tests.engine.constraints.drawing import draw_output, schema_constraint
from tests.harness.seeds import fresh_seed


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Literal["sit", "roll"]] = Field(max_length=2)


class Node(BaseModel):
    name: Annotated[str, Field(max_length=3)]
    next: Optional["Node"] = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: Annotated[list[T], Field(max_length=2)]


class Movie(TypedDict):
    title: str
    year: int


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Pair:
    left: int
    right: bool


class Tags(RootModel[list[Color]]):
    pass


# What pydantic 2.12 writes for Decimal; later versions leave the pattern out.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"

HELD: dict[str, Any] = {
    "str": str,
    "constr pattern": constr(pattern=r"^[A-Z]{3}-\d+$"),
    "constr lengths": constr(min_length=2, max_length=5),
    "constr strip": Annotated[str, StringConstraints(to_lower=True, max_length=4)],
    "int": int,
    "conint": conint(gt=3, le=40),
    "conint multiple": conint(multiple_of=5, ge=-10),
    "positive int": PositiveInt,
    "non-negative int": NonNegativeInt,
    "float": float,
    "confloat": confloat(ge=0, lt=1),
    "confloat multiple": confloat(multiple_of=0.5),
    "confloat decimal multiple": confloat(multiple_of=0.1, ge=0, le=2),
    "Decimal": Annotated[Decimal, WithJsonSchema({"type": "string", "pattern": DECIMAL})],
    "bool": bool,
    "bytes": bytes,
    "base64 bytes": Base64Bytes,
    "date": date,
    "date within bounds": Annotated[
        date, Field(ge=date(2020, 1, 1), json_schema_extra={"pattern": "^20[2-9][0-9]-.*$"})
    ],
    "datetime": datetime,
    "aware datetime": AwareDatetime,
    "time": time,
    "timedelta": timedelta,
    "UUID": UUID,
    "UUID4": UUID4,
    "email": Annotated[str, Field(json_schema_extra={"format": "email"})],
    "AnyUrl": AnyUrl,
    "HttpUrl": Annotated[HttpUrl, Field(json_schema_extra={"pattern": "^https?://.*$"})],
    "IPv4Address": IPv4Address,
    "IPv6Address": IPv6Address,
    "Path": Path,
    "Enum": Color,
    "IntEnum": Level,
    "Literal": Literal["a", 1, None],
    "Optional": int | None,
    "Union": int | bool | Closed,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list": list[int],
    "conlist": conlist(bool, min_length=1, max_length=3),
    "set of literals": set[Literal["a", "b", "c"]],
    "frozenset of an enum": frozenset[Color],
    "tuple": tuple[int, str, bool],
    "tuple of any length": tuple[bool, ...],
    "dict": dict[str, int],
    "dict with int keys": Annotated[
        dict[int, bool], Field(json_schema_extra={"propertyNames": {"pattern": r"^\d{1,4}$"}})
    ],
    "dict with literal keys": dict[Literal["a", "b"], int],
    "dict with patterned keys": dict[constr(pattern="^[a-z]{1,8}$"), bool],
    "dict with uuid keys": dict[UUID, int],
    "dict of some length": Annotated[dict[str, bool], Field(min_length=1, max_length=3)],
    "TypedDict": Movie,
    "NamedTuple": Point,
    "dataclass": Pair,
    "nested model": Closed,
    "described model": Annotated[Closed, Field(description="why")],
    "recursive model": Node,
    "extra allow": Open,
    "generic model": Page[Color],
    "Any": Any,
    "None": None,
    "Annotated": Annotated[int, Field(ge=0, description="count", examples=[1])],
    "RootModel": Tags,
    "deque": deque[bool],
    "Sequence": Sequence[bool],
    "Mapping": Mapping[str, bool],
    "SecretStr": SecretStr,
    "Pattern": Pattern[str],
    "ByteSize": Annotated[ByteSize, WithJsonSchema({"type": "integer", "minimum": 0})],
}
# Distinct items without a list of values cannot be kept.
REFUSED: dict[str, Any] = {"set of strings": set[str], "frozenset of ints": frozenset[int]}


def model_of(annotation: Any) -> type[BaseModel]:
    return create_model("Holder", field=(annotation, ...))


def read_back(model: type[BaseModel], num_outputs: int) -> int:
    """How many of the outputs ended; each of these has to be one of the model's."""
    schema, seed = model.model_json_schema(), fresh_seed()
    constraint, draw, num_read = schema_constraint(schema), random.Random(seed), 0
    for _ in range(num_outputs):
        output = draw_output(constraint, draw)
        if output is not None:
            num_read += 1
            problem = find_problem(schema, output.decode())
            assert problem is None, f"seed {seed}: {output!r}: {problem}"
            model.model_validate_json(output)
    return num_read


def test_what_is_drawn_under_a_models_schema_is_read_back_by_it() -> None:
    num_read = sum(read_back(model_of(annotation), 1) for annotation in HELD.values())
    assert num_read > len(HELD) / 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", HELD)
def test_much_of_each_type_is_read_back(name: str) -> None:
    assert read_back(model_of(HELD[name]), 100) > 10


@pytest.mark.parametrize("name", REFUSED)
def test_a_set_of_anything_is_refused_with_what_to_do(name: str) -> None:
    schema = model_of(REFUSED[name]).model_json_schema()
    with pytest.raises(
        RequestError, match=r"uniqueItems.*leave it out, or give the items an 'enum'"
    ):
        restrict(json.loads(json.dumps(schema)), "schema")


def test_a_default_tag_is_written_nevertheless() -> None:
    schema = model_of(HELD["discriminated union"]).model_json_schema()
    assert "required" in json.dumps(schema["$defs"]["Cat"])
    for seed in range(20):
        output = draw_output(schema_constraint(schema), random.Random(seed))
        assert output is None or "kind" in json.loads(output)["field"]
