"""Model folders without weights that an application starts from: shapes, and a tokenizer as large.

    python -m load_tests.lab.model_folder --shapes qwen3-8b --out /tmp/q
    python -m load_tests.lab.model_folder --out /tmp/tiny \\
        --override num_hidden_layers=2 hidden_size=64

For `model.weights: random`. The tokenizer is the demonstration model's; ids that it lacks get texts
of their own, so that every id of the vocabulary may be sent and each sampled one is text.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.testbed.padded_tokenizer import TOKENIZER_FOLDER, padded_tokenizer

# A folder of the Hub says this, too. Of one that does not, some versions of transformers (5.10 is
# one) warn that its tokenizer has an "incorrect regex pattern": they take it for Mistral's.
WRITTEN_BY = "4.51.0"


def write_model_folder(
    shapes: str, out: Path, overrides: Mapping[str, object] | None = None
) -> Path:
    """Write config.json and tokenizer of `shapes`, one of SHAPES, to the new folder out/shapes.

    overrides: keys of config.json with other values. Raises FileExistsError for a folder that is
    there, and ValueError for a key that the shapes do not have or a vocabulary that is too small.
    """
    wanted = dict(SHAPES[shapes])
    unknown = sorted(set(overrides or {}) - set(wanted))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not in {shapes}; known: {', '.join(wanted)}")
    wanted |= {"transformers_version": WRITTEN_BY} | dict(overrides or {})
    tokenizer = padded_tokenizer(int(str(wanted["vocab_size"])))
    folder = write_shapes(shapes, out)
    (folder / "config.json").write_text(json.dumps(wanted, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TOKENIZER_FOLDER / "tokenizer_config.json", folder)
    return folder


def parse_settings(settings: Sequence[str]) -> dict[str, object]:
    """`key=value`, the value as YAML reads it. Raises ValueError for one without `=`."""
    parsed: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r}: expected key=value")
        parsed[key] = yaml.safe_load(value)
    return parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="the folder is made below it")
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print(write_model_folder(args.shapes, args.out, parse_settings(args.override)))


if __name__ == "__main__":
    main()
