"""A prefill and a decode engine in this process: prompts move between them without a network."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from configs.schema import AppConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.kv.transfer import HandoffReady, OutgoingEvent
from engine.messages import Role
from engine.request import Request, RequestKey, RequestSpec, SamplingParams

BLOCK_KEY = bytes(32)
_ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(slots=True, kw_only=True)
class HandedOver:
    """A request's tokens, and when the decode side had each; the first came with the handoff."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class LocalPair:
    """Two engines of one configuration; the decode side copies and checks whole blocks."""

    def __init__(self, config: AppConfig) -> None:
        self._ready: list[HandoffReady] = []
        self.prefill, self.decode = (self.build(config, role) for role in _ROLES)

    def build(self, config: AppConfig, role: Role) -> Engine:
        return build_engine(config, "pair", MonotonicClock(), self._note, BLOCK_KEY, role=role)

    def _note(self, event: OutgoingEvent) -> None:
        if isinstance(event, HandoffReady):
            self._ready.append(event)

    def answer(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        arrived: Callable[[list[int]], None] = lambda block_ids: None,
    ) -> list[HandedOver]:
        """All answers, computed together; `arrived` is called with each prompt's blocks there."""
        keys = [RequestKey(f"{number:032x}") for number in range(len(asked))]
        found = {key: HandedOver() for key in keys}
        specs = {}
        for key, (prompt, params) in zip(keys, asked, strict=True):
            specs[key] = RequestSpec(params=params)
            request = _request(key, specs[key], prompt)
            request.decode_worker = "decode"
            self.prefill.core.scheduler.add(request)
        _run(self.prefill, found)
        ready, self._ready[:] = list(self._ready), []
        for event in ready:
            prompt, _ = asked[keys.index(event.key)]
            arrived(self._move(event, specs[event.key], prompt))
        _run(self.decode, found)
        return [found[key] for key in keys]

    def _move(self, event: HandoffReady, spec: RequestSpec, prompt: Sequence[int]) -> list[int]:
        request = _request(event.key, spec, prompt)
        self.decode.hasher.extend(request)
        block_ids = self.decode.shared_cache.allocate(len(event.block_ids))
        assert block_ids is not None, "the decode side has no room"
        self.copy(event.block_ids, block_ids)
        self.prefill.outgoing.release(event.key)
        request.block_ids = block_ids
        request.num_computed_tokens = request.num_known_tokens
        request.tokens.append(event.first_token_id)
        request.num_emitted_tokens += 1
        request.num_drafter_tokens = event.num_drafter_tokens
        self.decode.shared_scheduler.join(request)
        return block_ids

    def copy(self, block_ids: Sequence[int], there: Sequence[int]) -> None:
        """Copy blocks of the prefill side to those of the decode side, and check them."""
        source, target = self.prefill.kv_store, self.decode.kv_store
        moved = source.gather(block_ids)
        target.scatter(there, moved.view(-1).view(torch.uint8))
        assert target.digest(there) == source.digest(block_ids)


def _request(key: RequestKey, spec: RequestSpec, prompt: Sequence[int]) -> Request:
    return Request(
        key=key,
        ingress_id="pair",
        spec=spec,
        tokens=list(prompt),
        num_prompt_tokens=len(prompt),
        arrival_s=time.monotonic(),
    )


def _run(engine: Engine, found: dict[RequestKey, HandedOver]) -> None:
    while engine.core.has_work:
        output = engine.core.step()
        assert not output.failures, f"failed: {output.failures}"
        for _, record in output.tokens:
            found[record.key].tokens.append(record.token_id)
            found[record.key].times_s.append(time.perf_counter())
