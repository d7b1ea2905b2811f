"""A worker of two ranks on GPUs: its host tier's blocks come back, and tokens are the same bits."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from engine.clock import ManualClock
from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.layers.context import Comm
from engine.request import SamplingParams
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import STAGED, RankProcesses
from tests.harness.seeds import fresh_random

SETTINGS = {
    "model__device": "cuda",
    "model__dtype": "bfloat16",
    "model__deterministic": True,
    "model__max_model_len": 1024,
    "workers__num_gpus": 1,
    "scheduler__max_num_seqs": 3,
    "scheduler__overlap": True,
    "cache__num_blocks": 96,
}
NO_CACHE = {"cache__enable_prefix_caching": False}
NUM_TURNS = 4

Texts = list[list[list[int]]]  # of turns, by conversation


def _build(comm: Comm, key: bytes, settings: Mapping[str, object]) -> Engine:
    return start_engine(comm, key, ManualClock(), **SETTINGS, **settings)


def _talk(engine: Engine, conversations: Sequence[Sequence[int]]) -> Texts:
    """Each turn's tokens; conversations go on with their answers and more."""
    texts, said = list[list[list[int]]](), [list(tokens) for tokens in conversations]
    for turn in range(NUM_TURNS):
        texts.append([])
        for first in range(0, len(said), 3):
            part = said[first : first + 3]
            params = [
                SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=turn, ignore_eos=True)
                for i in range(len(part))
            ]
            for own, found in zip(
                part, answer(engine, list(zip(part, params, strict=True))), strict=True
            ):
                texts[-1].append(found.tokens)
                own += [*found.tokens, *range(40 + turn, 70 + turn)]
    return texts


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(STAGED, marks=pytest.mark.gpu),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)
def test_two_ranks_say_from_loaded_parts_what_they_say_without_a_cache(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, found = fresh_random(), list[Texts]()
    conversations = [
        [rng.randrange(3, 3000) for _ in range(rng.randrange(150, 500))] for _ in range(9)
    ]
    graphs = {"execution__cuda_graphs": device == "cuda"}
    with RankProcesses(2, tmp_path, device) as ranks:
        for settings in (NO_CACHE, {"cache__host_gib": 0.25}):
            key = secrets.token_bytes(32)
            with LedRanks(ranks, _build, key, settings | graphs) as led:
                engine = _build(ranks.comm, key, settings | graphs)
                led.lead_engine(engine)
                if engine.host_tier is not None:
                    monkeypatch.setattr(engine.host_tier, "load_seconds", lambda blocks: 0.0)
                found.append(_talk(engine, conversations))
                check_blocks(engine.cache, engine.core.scheduler.owners())
                load = engine.load().host_tier
                engine.close()
    assert load is not None
    assert (load.num_loaded > 0, load.num_corrupt) == (True, 0)
    assert found[0] == found[1]
