"""Prints docs/configuration.md from `configs/schema.py`: every key, its type, default and meaning.

    python -m configs.reference > docs/configuration.md

A key's meaning is the comment beside it or right above it in the schema, so there is one place to
change. A test holds the page to what is printed here, and every key to having a meaning.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import get_args

from configs.load import RENAMED, load_config
from configs.schema import OpenPath

PAGE_WIDTH = 120
SCHEMA = Path(__file__).with_name("schema.py")
ROOT = "AppConfig"
_BOUND = re.compile(r"Annotated\[(.+?), Meta\(((?:[^()]|\([^()]*\))*)\)\]")
# Names of the schema for bounded types.
_NAMED = {
    "Positive": "int, >= 1",
    "Seconds": "float, > 0",
    "Share": "float, > 0 and <= 1",
    "Auto": "auto",
    "Measured": "measured",
    "AttentionName": "name of a backend",
    "KeyName": "name",
    "Sha256": "64 hex digits",
    "LimitName": "name or *",
    "OpenPath": "one of " + ", ".join(get_args(OpenPath)),
}

HEAD = """# Configuration

<!-- Made by `python -m configs.reference > docs/configuration.md` from configs/schema.py. -->

A run is one YAML file over the defaults below. An unknown key, a wrong type or a contradiction ends
the start with one error that names the file, the key and what is allowed.

    LAPS_CONFIG=configs/unified_cpu.yaml LAPS_MODEL=Qwen/Qwen3-0.6B make serve
    serve run serve_app:app                                  # reads the same two variables
    serve run serve_app:build config=my.yaml model=/models/Qwen3-0.6B

`LAPS_MODEL` (or `model=`) sets `model.path`: a folder, or a name on the Hugging Face Hub
(`org/name`, `org/name@revision`) where there is no folder of that name. `LAPS_API_KEYS` adds API
keys, separated by commas; `LAPS_HOST` and `LAPS_PORT` (or `host=` and `port=`) say where to listen,
else 127.0.0.1:8000. A relative path, there or in a file, is looked up in the project's folder,
then in the working directory; `cache.disk_path` alone is taken as it is: write it in full.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section, as the schema writes it."""

    name: str
    kind: str  # its annotation
    default: str  # "" = it has to be given
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    meaning: str
    keys: list[Key]


def read_schema(path: Path = SCHEMA) -> dict[str, Section]:
    """Class name -> section, of every struct of the schema."""
    source = path.read_text()
    lines = source.splitlines()
    return {
        node.name: Section(
            meaning=(ast.get_docstring(node) or "").replace("\n", " ").replace("  ", " "),
            keys=[
                _key(field, source, lines)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ],
        )
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _key(field: ast.AnnAssign, source: str, lines: list[str]) -> Key:
    assert isinstance(field.target, ast.Name)
    value = "" if field.value is None else ast.get_source_segment(source, field.value) or ""
    assert field.end_lineno is not None
    beside = lines[field.end_lineno - 1][field.end_col_offset or 0 :].strip()
    comment = beside.removeprefix("#").strip() if beside.startswith("#") else ""
    return Key(
        name=field.target.id,
        kind=ast.get_source_segment(source, field.annotation) or "",
        default=value,
        meaning=" ".join([*_above(field.lineno - 1, lines), comment]).strip(),
    )


def _above(line: int, lines: list[str]) -> list[str]:
    """The comment right above a line, but for the headings between groups of keys."""
    found: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("#"):
        line -= 1
        text = lines[line].strip().removeprefix("#").strip()
        if text.startswith("--"):
            break
        found.insert(0, text)
    return found


def _pages(schema: dict[str, Section]) -> Iterator[str]:
    """One table a section, in the order of the whole configuration."""
    root = schema[ROOT]
    sections = [key for key in root.keys if key.kind in schema]
    yield "## Top level\n"
    yield _table([key for key in root.keys if key.kind not in schema])
    for key in sections:
        section = schema[key.kind]
        yield f"## `{key.name}`\n\n{_wrapped(section.meaning)}\n"
        yield _table(section.keys)
        for inner in section.keys:
            for name in re.findall(r"\w+Config\b", inner.kind):
                yield f"### `{key.name}.{inner.name}`\n\n{_wrapped(schema[name].meaning)}\n"
                yield _table(schema[name].keys)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(keys: list[Key]) -> str:
    rows = [
        f"| `{key.name}` | `{_cell(_kind(key.kind))}` | {_default(key)} | {_cell(key.meaning)} |"
        for key in keys
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _kind(annotation: str) -> str:
    """An annotation as a reader of YAML thinks of it."""
    if annotation.endswith("Config"):
        return "section, see below"
    words = re.sub(r"\w+Config\b", "section, see below", annotation)
    words = _BOUND.sub(lambda m: f"{m[1]}, {_bounds(m[2])}", words)
    words = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace('"', ""), words)
    for name, meaning in _NAMED.items():
        words = re.sub(rf"\b{name}\b", meaning, words)
    return words.replace(" | None", " or null")


def _bounds(text: str) -> str:
    signs = {
        "ge": ">=",
        "gt": ">",
        "le": "<=",
        "lt": "<",
        "min_length": "length >=",
        "pattern": "like",
    }
    pairs = [pair.split("=", 1) for pair in text.split(", ")]
    return ", ".join(f"{signs[name]} {value}" for name, value in pairs)


def _default(key: Key) -> str:
    if not key.default:
        return "required"
    return "its own" if key.default.endswith("Config()") else f"`{_cell(key.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _files() -> str:
    """The configurations that ship, with the first comment of each."""
    rows = []
    for path in sorted(SCHEMA.parent.glob("*.yaml")):
        lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        about = " ".join(line.removeprefix("#").strip() for line in lines)
        workers = load_config(path, {}).workers
        ranks = workers.num_ranks
        roles = ", ".join(
            f"{getattr(workers, role)} {role}"
            + (f" of {ranks[role]} ranks" if ranks[role] > 1 else "")
            for role in ("prefill", "decode", "unified")
            if role in ranks
        )
        rows.append(f"| `configs/{path.name}` | {roles} | {_cell(about)} |")
    return "\n".join(["| file | workers | for |", "|---|---|---|", *rows, ""])


def render() -> str:
    """The whole page."""
    renamed = [f"| `{old}` | {new} |" for old, new in RENAMED.items()]
    return "\n".join(
        [
            HEAD,
            "## Files that ship\n",
            _files(),
            *_pages(read_schema()),
            "## Keys that had another name\n",
            "\n".join(["| old key | instead |", "|---|---|", *renamed]),
            "",
        ]
    )


if __name__ == "__main__":
    print(render(), end="")
