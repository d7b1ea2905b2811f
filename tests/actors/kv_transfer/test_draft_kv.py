"""A draft model's K and V come with reserved blocks, and are believed only where they came.

Books, pieces and stores are the real ones, as in test_dp_handoffs.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.messages import Role
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.drafting import Drafting
from tests.actors.kv_transfer.engine_pair import ROLES, Pair
from tests.engine.speculation.drafting_stories import exact_drafts, nums_missing
from tests.engine.speculation.exact_engines import start_exact
from tests.engine.speculation.guessed_engines import Asked, run, save_exact_model
from tests.harness.in_process import answer, start_engine
from tests.harness.rank_processes import RankProcesses
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import save_model

SEED = seed_of(__name__)
PROMPT = list(range(3, 32))  # three full blocks and five tokens
NUM_FULL = 24
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
HOT = SamplingParams(max_tokens=8, temperature=3.0, ignore_eos=True)  # gets no drafts


def _drafting(path: Path) -> dict[str, object]:
    return {
        "speculation.drafter": "draft_model",
        "speculation.model_path": str(path),
        "speculation.max_drafts": 3,
        "speculation.adaptive": False,
        "speculation.prompts_on_prefill": True,
    }


class _Worker:
    """Both sides, whose draft model is their target."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        stack.enter_context(exact_drafts())
        self.pair = Pair(stack, {}, folder, (1, 1), _drafting(folder))
        self.drafting = self.pair.engines["decode"].core.scheduler.drafting
        self.nums_missing = nums_missing(self.drafting)

    def answer(self, *asked: Asked) -> list[list[int]]:
        return [tokens for one in asked for tokens in self.pair.answer([one])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_exact_model(path, seed=SEED)
    return path


@pytest.fixture
def worker(folder: Path) -> Iterator[_Worker]:
    with ExitStack() as stack:
        yield _Worker(folder, stack)


def _expected(folder: Path, *asked: Asked) -> list[list[int]]:
    plain = start_exact(folder, speculation__drafter="none")
    return [found.tokens for one in asked for found in run(plain, [one])]


def test_blocks_that_the_decode_side_has_need_not_come(folder: Path, worker: _Worker) -> None:
    asked = [(PROMPT, GREEDY), ([*PROMPT[:25], 40], GREEDY), (PROMPT, GREEDY)]
    assert worker.answer(*asked) == _expected(folder, *asked)
    assert worker.nums_missing == [0, 0, 0]
    assert worker.pair.incoming.statistics().num_hit_blocks == 6
    counts = worker.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 5


def test_blocks_found_without_it_are_completed_once(folder: Path, worker: _Worker) -> None:
    """Neither side has computed it of the prompt of a request without drafts."""
    asked = [(PROMPT, HOT), (PROMPT, GREEDY), (PROMPT, GREEDY)]
    assert worker.answer(*asked)[1:] == _expected(folder, *asked)[1:]
    assert worker.nums_missing == [len(PROMPT), len(PROMPT) - NUM_FULL]
    counts = worker.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 5


def test_what_lay_in_blocks_is_not_believed_of_their_next_content(
    folder: Path, worker: _Worker
) -> None:
    """Whoever gets blocks may overwrite them with anything, and give up before a request joins."""
    asked: list[Asked] = [(PROMPT, GREEDY)]
    expected = _expected(folder, *asked)
    decode = worker.pair.engines["decode"]
    assert worker.answer(*asked) == expected
    block_ids = decode.shared_cache.allocate(decode.cache.num_available)
    assert block_ids is not None
    decode.kv_store.tensor[block_ids] = 7.0
    decode.shared_cache.release(block_ids)
    request = Request(
        key=RequestKey("f" * 32),
        ingress_id="test",
        spec=RequestSpec(params=GREEDY),
        tokens=list(PROMPT),
        num_prompt_tokens=len(PROMPT),
        arrival_s=0.0,
    )
    decode.core.scheduler.add(request)  # its KV is computed here, as after a preemption
    found: dict[RequestKey, list[int]] = {request.key: []}
    worker.pair._run("decode", found)
    assert [*found.values()] == expected
    assert worker.nums_missing == [0, len(PROMPT)]
    counts = worker.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 5


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Role, RankProcesses]]:
    """Two ranks for each side."""
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(RankProcesses(2, tmp_path_factory.mktemp(role)))
            for role in ROLES
        }


def _draftings(pair: Pair) -> list[Drafting]:
    scheduler = pair.engines["decode"].core.scheduler
    of_rank = scheduler.of_rank if isinstance(scheduler, DpScheduler) else [scheduler]
    return [one.drafting for one in of_rank]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_it_moves_between_ranks_with_requests_of_their_own(
    sizes: tuple[int, int], gangs: dict[Role, RankProcesses], tmp_path: Path
) -> None:
    target, other = tmp_path / "target", tmp_path / "draft"
    save_model(target, "Qwen3MoeForCausalLM", seed=SEED, num_experts=8)
    save_model(other, seed=SEED + 1, num_hidden_layers=3)
    asked = [(list(range(n, 2 * n + 5)), GREEDY) for n in (3, 9, 20, 31)]
    more = _drafting(other) | {
        "workers.expert_parallel": True,
        "workers.enable_dp_attention": True,
    }
    expected = [one.tokens for one in answer(start_engine(model__path=str(target)), asked)]
    with ExitStack() as stack:
        pair = Pair(stack, gangs, target, sizes, more)
        watched = [nums_missing(drafting) for drafting in _draftings(pair)]
        for _ in range(2):
            assert pair.answer(asked) == expected
        assert [num for nums in watched for num in nums] == [0] * 8
        assert all(watched), "each rank had requests"
