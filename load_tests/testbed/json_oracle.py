"""Whether a text is a value of a JSON schema, by `jsonschema`: the oracle of held outputs."""

import json
import re

import jsonschema
from jsonschema.validators import validator_for

from load_tests.testbed.random_schemas import Schema


def find_problem(schema: Schema, text: str) -> str | None:
    """Why `text` is no JSON value of `schema`; None when it is one, as far as that can be told.

    It cannot where the oracle does not read a pattern, follows references without end, or divides
    a number that is infinite for it. Draft 2020-12 is meant unless the schema names another one.
    """
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    except (re.error, RecursionError, OverflowError):
        return None
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
