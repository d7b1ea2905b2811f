"""From a restricted JSON schema to a grammar: the compiler's own, with our ranges of numbers in it.

Where a number has bounds the compiler is given a string that stands nowhere else, and what it wrote
for that string is replaced.
"""

import re

import msgspec
import xgrammar

from engine.constraints.number_range import BOUNDS, RangeGrammar, read_range
from engine.constraints.satisfiability import Schema, nodes_of

# Items on one line, as json.dumps writes them: free white space lets a model write it for ever.
_ON_ONE_LINE = False


def schema_grammar(text: str) -> xgrammar.Grammar:
    """Of a restricted schema's JSON. Raises RuntimeError for what the compiler does not take."""
    schema = msgspec.json.decode(text, type=Schema)
    name = "range"
    while name in text:
        name += "_"
    ranges = RangeGrammar(name)
    for node in nodes_of(schema):
        if not node.keys().isdisjoint(BOUNDS):
            rule = ranges.add(read_range(node))
            node.clear()
            node["enum"] = [rule]
    grammar = xgrammar.Grammar.from_json_schema(_text_of(schema), any_whitespace=_ON_ONE_LINE)
    rules = ranges.as_text()
    if not rules:
        return grammar
    written = re.sub(rf'"\\"({name}[0-9]+)\\""', r"\1", str(grammar))
    return xgrammar.Grammar.from_ebnf(f"{written}\n{rules}")


def _text_of(schema: Schema) -> str:
    return str(msgspec.json.encode(schema), "utf-8")
