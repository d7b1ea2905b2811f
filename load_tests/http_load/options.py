"""The command line of a load, the same for one run under locust and for a sweep of runs."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from load_tests.http_load.client import AskOptions, LoadError, Server
from load_tests.http_load.dialogue import Content, PromptStyle
from load_tests.http_load.scenario import Changes, Scenario, ScenarioError, change, read_scenario

VOCAB_SIZE = 1000  # every model has so many ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a command line says, parsed; nothing is read yet."""

    scenario: str
    changes: Changes
    style: PromptStyle
    takes_extensions: bool
    tokens_per_word: float
    vocab_size: int
    model: str | None
    api_key_file: str | None
    salt: int

    def read_scenario(self) -> Scenario:
        """Raises ScenarioError."""
        return change(read_scenario(self.scenario), self.changes)

    def server(self, url: str) -> Server:
        """Raises LoadError if the key cannot be read."""
        if self.api_key_file is None:
            return Server(url=url)
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise LoadError(f"--api-key-file: {error}") from error
        return Server(url=url, api_key=key)

    def ask_options(self) -> AskOptions:
        """Of the model that was named; without one, the preflight finds it."""
        return AskOptions(
            model=self.model or "", style=self.style, takes_extensions=self.takes_extensions
        )

    def content(self) -> Content:
        return Content(
            salt=self.salt, vocab_size=self.vocab_size, tokens_per_word=self.tokens_per_word
        )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What a load is, without its rate and its seed."""
    add = parser.add_argument
    add("--scenario", default="mixed", help="a name in load_tests/scenarios, or a .yaml file")
    add("--duration", type=float, help="seconds of arrivals [the scenario's]")
    add("--cancelled", type=float, help="share of clients that hang up [the scenario's]")
    add("--shrink", type=int, help="divide all lengths by it, for small models")
    add("--trace", help="the recorded file that a trace scenario replays")
    add(
        "--prompts",
        choices=[style.value for style in PromptStyle],
        default=PromptStyle.IDS.value,
        help="token ids or text to /v1/completions, or chat messages",
    )
    add("--tokens-per-word", type=float, default=1.0, help="an estimate, for text and chat")
    add("--vocab-size", type=int, default=VOCAB_SIZE, help="token ids are drawn below it")
    add("--model", help="its name [the first one that the server lists]")
    add("--openai-only", action="store_true", help="send no field that OpenAI does not know")
    add("--api-key-file", help="a file with the server's key")


def read_load_arguments(
    args: argparse.Namespace,
    *,
    rate: float | str | None,
    seed: int | str | None,
) -> LoadOptions:
    """Draws a salt: no run is to find the prompts of another in a prefix cache.

    Numbers may be text, and nothing may be empty text: that is how a web page sends them. Raises
    ScenarioError for text that is no number.
    """
    named = {
        "rate": rate,
        "duration_s": args.duration,
        "seed": seed,
        "share_cancelled": args.cancelled,
        "shrink": args.shrink,
        "trace": args.trace,
    }
    said = {name: value for name, value in named.items() if value not in (None, "")}
    try:
        changes = msgspec.convert(said, Changes, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioError(str(error)) from error
    return LoadOptions(
        scenario=args.scenario,
        changes=changes,
        style=PromptStyle(args.prompts),
        takes_extensions=not args.openai_only,
        tokens_per_word=args.tokens_per_word,
        vocab_size=args.vocab_size,
        model=args.model or None,
        api_key_file=args.api_key_file or None,
        salt=random.SystemRandom().randrange(2**32),
    )


def to_arguments(args: argparse.Namespace) -> list[str]:
    """The same command line again, for a process that runs in another folder."""
    is_file = args.scenario.endswith((".yaml", ".yml"))
    named = {
        "--scenario": Path(args.scenario).resolve() if is_file else args.scenario,
        "--duration": args.duration,
        "--cancelled": args.cancelled,
        "--shrink": args.shrink,
        "--trace": Path(args.trace).resolve() if args.trace else None,
        "--prompts": args.prompts,
        "--tokens-per-word": args.tokens_per_word,
        "--vocab-size": args.vocab_size,
        "--model": args.model,
        "--api-key-file": Path(args.api_key_file).resolve() if args.api_key_file else None,
    }
    words = [f"{name}={value}" for name, value in named.items() if value is not None]
    return [*words, "--openai-only"] if args.openai_only else words
