"""What an engine chooses for this machine's device where its configuration says `auto`.

    python -m load_tests.lab.show_choices --config configs/gpu.yaml --shapes qwen3-8b
    python -m load_tests.lab.show_choices --device cpu --model demo_model/laps-demo

Builds the engine in this process, with random weights, and prints the choices with their reasons,
the steps that were measured for them, and how long it all took. Ends with an error if the
calibration took over 3 s, a kernel compiled after the start, or a short run of the engine fails.
Knows no Ray.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from configs.load import load_config
from configs.schema import AppConfig
from engine.engine import Engine
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.prompts import RandomPrompts
from load_tests.tables import describe_machine

MAX_CALIBRATION_S = 3.0
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 200, 8


def engine_config(args: argparse.Namespace, folder: Path) -> AppConfig:
    """The file's engine, of random weights, on the device that was asked for."""
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.weights": "random",
        "model.max_model_len": args.max_model_len,
        "model.attention.prefill": args.attention_prefill,
        "cache.num_blocks": args.num_blocks,
    }
    if args.device == "cpu":
        overrides |= {"model.device": "cpu", "workers.num_gpus": 0}
    return load_config(args.config, overrides)


def render(engine: Engine, about: Mapping[str, object]) -> str:
    """The choices, the measured steps and the machine, one a line."""
    lines = [choice.describe() for choice in engine.limits.choices]
    calibration = engine.calibration
    if calibration is not None:
        lines += [f"decode step of up to 16 rows: {1e3 * calibration.decode_s:.2f} ms"]
        lines += [
            f"step of {num_tokens:,} prompt tokens: {1e3 * seconds:.2f} ms,"
            f" {num_tokens / seconds:,.0f} tokens/s"
            for num_tokens, seconds in calibration.chunks
        ]
        lines += [f"calibration: {len(calibration.samples)} samples in {calibration.took_s:.2f} s"]
    lines += [engine.describe()]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in about.items())])


def problems(engine: Engine) -> list[str]:
    """What is not as it should be; empty if all is well."""
    found = []
    calibration, compiled = engine.calibration, engine.compilations.names
    if calibration is not None and calibration.took_s > MAX_CALIBRATION_S:
        found.append(f"the calibration took {calibration.took_s:.1f} s")
    if compiled:
        found.append(f"kernels compiled after the start: {list(compiled)}")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--config", type=Path, default=Path("configs/gpu.yaml"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-model-len", type=int, help="default: what config.json allows")
    parser.add_argument("--attention-prefill", default="auto", metavar="NAME")
    parser.add_argument("--num-blocks", type=int, help="default: as many as fit")
    return parser


def run(args: argparse.Namespace, scratch: Path) -> tuple[str, list[str]]:
    """Returns the report, and the problems."""
    folder = args.model or write_shapes(args.shapes, scratch)
    started_s = time.perf_counter()
    ours = EngineInProcess(engine_config(args, folder))
    built_s = time.perf_counter() - started_s
    random = RandomPrompts(ours.engine.spec.vocab_size, seed=0)
    prompts = random.draw(NUM_PROMPTS, NUM_PROMPT_TOKENS)
    answers = ours.generate(prompts, NUM_OUTPUT_TOKENS)
    assert [len(tokens) for tokens in answers] == [NUM_OUTPUT_TOKENS] * NUM_PROMPTS
    about = describe_machine() | {"built in": f"{built_s:.1f} s"}
    return render(ours.engine, about), problems(ours.engine)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        report, found = run(build_parser().parse_args(), Path(scratch))
    print(report)
    if found:
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
