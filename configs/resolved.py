"""Sections of the configuration in which nothing is `auto`: what an engine is built from.

Whoever knows the numbers (engine/runner/auto.py on a worker; the allocator, by what workers
report) makes them here. Knows no device.
"""

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from configs.schema import LapsConfig, Positive, SchedulerConfig

Milliseconds = Annotated[float, Meta(gt=0)]


class ResolvedScheduler(SchedulerConfig, frozen=True, kw_only=True):
    """A scheduler section in numbers."""

    max_num_batched_tokens: Positive = 512
    max_num_seqs: Positive = 64


class ResolvedLaps(LapsConfig, frozen=True, kw_only=True):
    """A laps section in numbers."""

    max_step_ms: Milliseconds = 50.0
    max_busy_step_ms: Milliseconds | None = None
    max_mixed_step_ms: Milliseconds | None = None
    batch_prefill_max_rows: Positive = 128


Section = TypeVar("Section", bound=msgspec.Struct)


def resolve_scheduler(config: SchedulerConfig, chosen: Mapping[str, object]) -> ResolvedScheduler:
    """`config` with numbers of `chosen`, by key, in place of `auto`.

    Raises msgspec.ValidationError for an `auto` without a number.
    """
    return _resolve(config, chosen, ResolvedScheduler)


def resolve_laps(config: LapsConfig, chosen: Mapping[str, object]) -> ResolvedLaps:
    """As `resolve_scheduler`."""
    return _resolve(config, chosen, ResolvedLaps)


def _resolve(config: msgspec.Struct, chosen: Mapping[str, object], kind: type[Section]) -> Section:
    values = msgspec.structs.asdict(config)
    left = [key for key, value in values.items() if value == "auto"]
    numbers = {key: chosen[key] for key in left if key in chosen}
    return msgspec.convert(values | numbers, type=kind)
