"""Conversations over a prefill and a decode engine that share an arena, on any device."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.clock import ManualClock
from engine.engine import Engine
from engine.kv.host.shared_file import FOLDER, PREFIX, name_for
from engine.messages import Role
from engine.request import SamplingParams
from tests.actors.kv_transfer.engine_pair import ROLES, Pair
from tests.harness.in_process import answer
from tests.harness.rank_processes import RankProcesses

NUM_CONVERSATIONS = 3


def check_conversations(
    folder: Path,
    settings: dict[str, object],
    alone: Engine,
    monkeypatch: pytest.MonkeyPatch,
    draw_id: Callable[[], int],
    gangs: dict[Role, RankProcesses] | None = None,
) -> None:
    """Three turns of a few conversations: the answers of `alone`, from all that was stored.

    The prefill worker evicts nothing: what it loads are blocks that the other has decoded. gangs:
    whose ranks have blocks of their own; then a prompt may come to another rank than before.
    """
    turns = [[draw_id() for _ in range(20)] for _ in range(NUM_CONVERSATIONS)]
    num_filled: list[int] = []  # blocks, in each turn, by answers
    with ExitStack() as stack:
        given = settings | {"cache.host_gib": 0.02, "cache.host_answers": True}
        # On this clock no time passes, so that no load is given up on a busy machine.
        sizes = (1, 1) if gangs is None else (2, 2)
        pair = Pair(stack, gangs or {}, folder, sizes, given, clock=ManualClock())
        size = pair.engines["prefill"].layout.block_size
        tiers = {role: pair.engines[role].host_tier for role in ROLES}
        for role in ROLES:
            stack.callback(pair.engines[role].close)
            monkeypatch.setattr(tiers[role], "load_seconds", lambda blocks: 0.0)
        assert tiers["decode"] is not None
        tiers["decode"].note_hit()  # else only a quarter is stored
        for number in range(3):
            params = SamplingParams(
                max_tokens=40, temperature=0.9 * (number % 2), seed=number, ignore_eos=True
            )
            found = pair.answer([(tokens, params) for tokens in turns])
            assert found == [one.tokens for one in answer(alone, [(t, params) for t in turns])]
            # The last token of an answer is not computed.
            num_filled.append(
                sum(
                    (len(prompt) + len(told) - 1) // size - len(prompt) // size
                    for prompt, told in zip(turns, found, strict=True)
                )
            )
            turns = [
                prompt + told + [draw_id() for _ in range(3)]
                for prompt, told in zip(turns, found, strict=True)
            ]
        decode, prefill = (pair.engines[role].load().host_tier for role in ("decode", "prefill"))
        assert decode is not None
        assert prefill is not None
        assert (decode.num_stored, decode.num_loaded) == (sum(num_filled), 0)
        assert prefill.num_stored == 0
        if gangs is None:
            assert prefill.num_loaded == sum(num_filled[:-1])
        assert 0 < prefill.num_loaded <= sum(num_filled[:-1])
        assert prefill.num_corrupt == 0
        for tier in tiers.values():
            assert tier is not None
            tier.check_conservation()
    assert not (FOLDER / f"{PREFIX}{name_for(bytes(32))}").exists()
