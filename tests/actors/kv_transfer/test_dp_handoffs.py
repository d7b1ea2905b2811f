"""Whole engines apart, one or both of two ranks with requests of their own: one rank's answers.

Books, pieces and stores are the real ones; a loop in place of calls and channels moves whole
prompts, as each channel does. With calls, channels and deaths:
tests/cluster/test_dp_attention_on_ray.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from engine.messages import Role
from engine.request import SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from tests.actors.kv_transfer.engine_pair import ROLES, Pair, Way, build_end
from tests.actors.kv_transfer.stored_answers import check_conversations
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.seeds import fresh_random
from tests.harness.tiny_models import LATENT_ON_GPU, VOCAB_SIZE, save_model

OWN_BLOCKS: dict[str, object] = {
    "workers.expert_parallel": True,
    "workers.enable_dp_attention": True,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, seed=3, ignore_eos=True)
ON_GPUS = OWN_BLOCKS | {
    "model.device": "cuda",
    "model.deterministic": True,  # so that answers do not depend on who computes beside whom
    "workers.num_gpus": 1,
    "cache.block_size": 16,
    "cache.num_blocks": 128,
}


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Role, RankProcesses]]:
    """Two ranks for each side."""
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(RankProcesses(2, tmp_path_factory.mktemp(role)))
            for role in ROLES
        }


@pytest.mark.parametrize(
    ("architecture", "more", "sizes"),
    [
        ("DeepseekV3ForCausalLM", {}, (2, 2)),
        ("DeepseekV3ForCausalLM", {}, (1, 2)),
        ("DeepseekV3ForCausalLM", {}, (2, 1)),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, (2, 2)),
    ],
    ids=str,
)
def test_answers_are_those_of_one_rank(
    architecture: str,
    more: dict[str, object],
    sizes: tuple[int, int],
    gangs: dict[Role, RankProcesses],
    tmp_path: Path,
) -> None:
    """And again, when both sides have the prompts' blocks."""
    save_model(tmp_path, architecture, seed=7, max_position_embeddings=512, **more)
    prompts = [list(range(n, 2 * n + 5)) for n in (3, 9, 20, 31)]
    asked = [(prompt, params) for params in (GREEDY, DRAWN) for prompt in prompts]
    alone = start_engine(model__path=str(tmp_path))
    expected = [one.tokens for one in answer(alone, asked)]
    with ExitStack() as stack:
        pair = Pair(stack, gangs, tmp_path, sizes, OWN_BLOCKS)
        at_once = 8 if sizes[1] == 2 else 4
        for _ in range(2):
            parts = [asked[i : i + at_once] for i in range(0, len(asked), at_once)]
            assert [one for part in parts for one in pair.answer(part)] == expected
        for role in ROLES:
            scheduler = pair.engines[role].core.scheduler
            if isinstance(scheduler, DpScheduler):
                numbers = [one.statistics().num_steps for one in scheduler.of_rank]
                assert all(numbers), "both ranks had requests"
        assert pair.incoming.statistics().num_hit_blocks > 0


def test_answers_of_ranks_are_stored_and_found(
    gangs: dict[Role, RankProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "DeepseekV3ForCausalLM", seed=7, max_position_embeddings=512)
    alone = start_engine(model__path=str(tmp_path))
    rng = fresh_random()
    given = tmp_path, OWN_BLOCKS, alone, monkeypatch, lambda: rng.randrange(VOCAB_SIZE)
    check_conversations(*given, gangs)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_answers_on_two_gpus_are_those_of_workers_that_do_both(tmp_path: Path) -> None:
    """Both gangs on the same GPUs; over what each channel uses."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    save_model(folder, "DeepseekV3ForCausalLM", seed=5, **sizes)
    prompts = [[i % VOCAB_SIZE for i in range(n, 2 * n + 5)] for n in (3, 9, 40, 71)]
    asked = [(prompt, params) for params in (GREEDY, DRAWN) for prompt in prompts]
    with ExitStack() as stack:
        gangs = {}
        for role in ROLES:
            (tmp_path / role).mkdir()
            gangs[role] = stack.enter_context(RankProcesses(2, tmp_path / role, "cuda"))
        given = folder, (2, 2), "unified", ON_GPUS
        with LedRanks(gangs["prefill"], build_end, *given) as led:
            both = build_end(gangs["prefill"].comm, *given)
            led.lead_engine(both)
            expected = [one.tokens for one in answer(both, asked)]
        ways: tuple[Way, ...] = ("host", "pulled", "staged")
        for way in ways:
            with ExitStack() as of_way:
                pair = Pair(of_way, gangs, folder, (2, 2), ON_GPUS, way)
                assert pair.answer(asked) == expected, way
                assert pair.answer(asked) == expected, way
