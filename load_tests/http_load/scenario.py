"""What a load test asks for: one YAML file, one record; an unknown key is an error.

    name: mixed                     shown in the report
    about: ...                      one sentence for its reader
    rate: 2.0                       requests/s on average, unless the command line says otherwise
    duration_s: 60                  of the arrivals; what is under way then is waited for
    cv_of_gaps: 1.0                 of the time between arrivals: 0 even, 1 Poisson, 3 bursty
    seed: 7
    short_tokens: 256               prompts of at most so many tokens are short, all others long
    share_cancelled: 0.2            clients that hang up in the middle of their answer
    slo: {short: {ttft_ms: 300, tpot_ms: 50}, long: {ttft_ms: 3000, tpot_ms: 50}}
    load:                           one of
      kind: drawn                     prompts that know nothing of each other
      kind: conversations             each turn repeats what was said and adds a question
      kind: trace                     recorded traffic from a file that the user has

A length is `{kind: fixed, tokens}`, `{kind: uniform, min, max}`, `{kind: lognormal, median, sigma,
min, max}` or `{kind: quantiles, points: [[share, tokens], ...]}`, log-linear between its points.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
LengthClass = Literal["short", "long"]
LENGTH_CLASSES: tuple[LengthClass, ...] = ("short", "long")


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the file and what to change."""


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    tokens: Count


class Uniform(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"
):
    """Both ends included."""

    min: Count
    max: Count

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")


class Lognormal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"
):
    """What falls outside `min` to `max` is moved to the nearer end."""

    median: Positive
    sigma: Positive
    min: Count
    max: Count

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")


class Quantiles(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="quantiles"
):
    """(share of requests, at most so many tokens), from share 0 to share 1."""

    points: tuple[tuple[Share, Count], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        is_rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.points))
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1 or not is_rising:
            raise ValueError("points must rise from share 0 to share 1")


Lengths = Fixed | Uniform | Lognormal | Quantiles


class PromptKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A share of the prompts. With documents, each begins with one of so many, drawn evenly."""

    share: Positive
    prompt_tokens: Lengths  # without the document
    output_tokens: Lengths
    num_documents: Annotated[int, Meta(ge=0)] = 0
    document_tokens: Lengths | None = None

    def __post_init__(self) -> None:
        if (self.num_documents > 0) != (self.document_tokens is not None):
            raise ValueError("num_documents and document_tokens come together")


class Drawn(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="drawn",
):
    prompts: Annotated[tuple[PromptKind, ...], Meta(min_length=1)]


class Conversations(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="conversations",
):
    """A conversation starts when it is due, its later turns `think_s` after the answer before.

    `rate` counts turns: conversations start at `rate` divided by the mean number of turns.
    """

    num_turns: Lengths
    system_tokens: Annotated[int, Meta(ge=0)] = 0  # the same start for all conversations
    question_tokens: Lengths
    output_tokens: Lengths
    think_s: Annotated[float, Meta(ge=0)] = 0.0  # mean of an exponential


class Trace(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="trace",
):
    """Recorded arrivals. A rate on the command line takes the place of `time_scale`."""

    format: Literal["azure", "mooncake"]
    path: str | None = None  # usually given on the command line
    start_s: Annotated[float, Meta(ge=0)] = 0.0  # of the recording
    time_scale: Positive = 1.0  # 2 = twice as fast as recorded


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request must keep to count as served well; None = no limit."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    short: Limits
    long: Limits

    def of(self, length_class: LengthClass) -> Limits:
        return self.short if length_class == "short" else self.long


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See the top of this file."""

    name: str
    about: str
    load: Drawn | Conversations | Trace
    slo: Slo
    duration_s: Positive = 60.0
    rate: Positive | None = None  # None only for a trace: as recorded
    cv_of_gaps: Annotated[float, Meta(ge=0)] = 1.0
    seed: Annotated[int, Meta(ge=0)] = 7
    short_tokens: Count = 256
    share_cancelled: Share = 0.0
    answer_timeout_s: Positive = 300.0  # from sending to the last token
    shrink: Count = 1  # divides every length and `short_tokens`, for small models

    def __post_init__(self) -> None:
        if self.rate is None and not isinstance(self.load, Trace):
            raise ValueError("rate: missing (requests/s)")
        if self.rate is not None and not math.isfinite(self.rate):
            raise ValueError("rate: must be finite")

    def class_of(self, num_prompt_tokens: int) -> LengthClass:
        limit = max(1, self.short_tokens // self.shrink)
        return "short" if num_prompt_tokens <= limit else "long"


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line says instead of the file; None = as the file says."""

    rate: float | None = None
    duration_s: float | None = None
    seed: int | None = None
    share_cancelled: float | None = None
    shrink: int | None = None
    trace: str | None = None


def read_scenario(name_or_path: str) -> Scenario:
    """A file, or one of this project's by its name. Raises ScenarioError."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml")))
        raise ScenarioError(f"{path}: no such scenario. Give a .yaml file or one of: {known}")
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Scenario)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def change(scenario: Scenario, changes: Changes) -> Scenario:
    """The scenario with what the command line says. Raises ScenarioError."""
    named = {k: v for k, v in msgspec.structs.asdict(changes).items() if v is not None}
    trace = named.pop("trace", None)
    if trace is not None:
        if not isinstance(scenario.load, Trace):
            raise ScenarioError(f"--trace: scenario {scenario.name} replays no trace")
        named["load"] = msgspec.structs.replace(scenario.load, path=trace)
    try:
        fields = {name: getattr(scenario, name) for name in scenario.__struct_fields__}
        raw = msgspec.to_builtins(fields | named)
        return msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"scenario {scenario.name}: {error}") from error
