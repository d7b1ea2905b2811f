"""Runs a whole engine on the calling thread: requests in, tokens out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.load import load_config
from engine.build import build_engine
from engine.clock import Clock, MonotonicClock
from engine.engine import Engine
from engine.kv.transfer import OutgoingEvent
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import TokenRecord
from engine.request import Request, RequestKey, RequestSpec, SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    finish: str | None = None


def start_engine(
    comm: Comm = SINGLE_RANK,
    block_key: bytes | None = None,
    clock: Clock | None = None,
    **overrides: object,
) -> Engine:
    """An engine of the shipped model, or of `model__path`; `a__b=1` sets the config key a.b.

    comm: to other ranks, which start an engine at the same time. block_key: of those that
    share the arena of `cache__host_gib`; an engine that has one is closed.
    """
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    dotted["workers.tensor_parallel_size"] = comm.rank.size
    config = load_config(None, dotted)
    return build_engine(
        config,
        "test",
        clock or MonotonicClock(),
        _no_handoff,
        block_key,
        comm=comm,
    )


def add_all(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[RequestKey]:
    """Queues every request; returns their keys in the same order."""
    keys = [RequestKey(f"{number:032x}") for number in range(len(requests))]
    for key, (prompt, params) in zip(keys, requests, strict=True):
        engine.core.scheduler.add(
            Request(
                spec=RequestSpec(params=params),
                key=key,
                ingress_id="test",
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                arrival_s=time.monotonic(),
            )
        )
    return keys


def answer(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Answer]:
    """Every request's tokens, all of them running together."""
    keys = add_all(engine, requests)
    answers = {key: Answer() for key in keys}
    while engine.core.has_work:
        output = engine.core.step()
        assert not output.failures, f"failed: {output.failures}"
        for _, record in output.tokens:
            found = answers[record.key]
            assert record.index == len(found.tokens), f"{record.key}: {record.index} comes late"
            found.tokens.append(record.token_id)
            found.records.append(record)
            found.finish = record.finish
    return [answers[key] for key in keys]


def _no_handoff(event: OutgoingEvent) -> None:
    raise AssertionError(f"a unified engine hands nothing over: {event}")
