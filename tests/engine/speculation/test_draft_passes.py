"""When a draft model's passes are launched and waited for, on an executor that only takes notes."""

from dataclasses import dataclass, field
from typing import Any

from engine.plan import NEWEST, StepPlan, StepResult
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.speculation.draft_model import DraftModel


@dataclass
class NotingExecutor:
    """Row r draws 10 * r + step; not finite in the (step, row) that `broken` names."""

    events: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    broken: tuple[int, int] | None = None

    def launch(self, plan: StepPlan) -> "NotedStep":
        self.events.append(f"launch {plan.step}")
        self.plans.append(plan)
        return NotedStep(plan, self)

    @property
    def max_in_flight(self) -> int:
        raise AssertionError("nobody asks")

    def give_drafts(self, place: int) -> None:
        raise AssertionError("drafts come to the host")


@dataclass
class NotedStep:
    plan: StepPlan
    executor: NotingExecutor

    @property
    def is_done(self) -> bool:
        raise AssertionError("nobody asks")

    def wait(self) -> StepResult:
        step, rows = self.plan.step, self.plan.rows
        self.executor.events.append(f"wait {step}")
        drawn = [[10 * row + step] if n else [] for row, n in zip(rows, self.plan.num_samples)]  # noqa: B905
        return StepResult(
            step=step,
            tokens=drawn,
            logprobs=[None] * len(rows),
            is_finite=[(step, row) != self.executor.broken for row in rows],
            duration_s=0.5,
        )


def start(executor: NotingExecutor) -> DraftModel:
    return DraftModel(
        executor, num_blocks=64, block_size=4, max_model_len=64, max_tokens=8, now_s=lambda: 0.0
    )


def request(row: int, num_tokens: int = 5, **params: Any) -> Request:
    found = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=20, ignore_eos=True, **params)),
        key=RequestKey(f"{row:032x}"),
        ingress_id="test",
        tokens=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        arrival_s=0.0,
    )
    found.row, found.block_ids = row, [8 * row + i for i in range(8)]
    return found


def test_a_pass_is_launched_before_the_one_before_is_waited_for() -> None:
    executor = NotingExecutor()
    drafter = start(executor)
    assert drafter.propose([(request(1), 4)]) == [[10, 11, 12, 13]]
    order = ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert executor.events == order
    assert [plan.drafts for plan in executor.plans] == [
        [(0, [NEWEST] * number)] for number in range(4)
    ]
    assert [plan.num_computed_tokens for plan in executor.plans] == [[0], [5], [6], [7]]
    assert drafter.pass_s > 0.1  # nears half a second


def test_where_a_choice_depends_on_the_drafts_every_pass_is_waited_for() -> None:
    executor = NotingExecutor()
    asked = [(request(1, 2), 3), (request(2, 2, frequency_penalty=0.5), 2)]
    assert start(executor).propose(asked) == [[10, 11, 12], [20, 21]]
    # The request with a penalty asks for two drafts; behind them nothing depends on tokens.
    assert executor.events == ["launch 0", "wait 0", "launch 1", "launch 2", "wait 1", "wait 2"]
    assert [plan.drafts for plan in executor.plans] == [
        [(0, []), (1, [])],
        [(0, [10]), (1, [20])],
        [(0, [NEWEST] * 2)],
    ]


def test_what_a_pass_draws_after_an_end_is_no_draft() -> None:
    """Neither after a token that ends the request, nor after numbers that are not finite."""
    executor = NotingExecutor(broken=(1, 2))
    asked = [(request(1, 2, stop_token_ids=(11,)), 4), (request(2, 2), 4), (request(3, 2), 4)]
    drafter = start(executor)
    assert drafter.propose(asked) == [[10, 11], [], [30, 31, 32, 33]]
    # Pass 2 was launched before pass 1 was known; what it wrote is zeroed behind it.
    assert [plan.rows for plan in executor.plans] == [[1, 2, 3]] * 3 + [[3]]
    last = executor.plans[-1]
    assert (last.zero_block_ids, last.released_rows) == (asked[1][0].block_ids, [2])
    drafter.propose(asked)
    (admission,) = executor.plans[4].admissions
    assert (admission.row, admission.num_computed_tokens) == (2, 0)


def test_a_request_that_is_not_caught_up_gets_no_drafts_and_holds_nobody_up() -> None:
    executor = NotingExecutor()
    assert start(executor).propose([(request(1, 3), 2), (request(2, 9), 2)]) == [[10, 11], []]
    assert [plan.rows for plan in executor.plans] == [[1, 2], [1]]


def test_requests_that_are_caught_up_wait_for_no_prompt() -> None:
    """Wherever they are among those asked; of the prompts the shortest ones are computed first."""
    executor = NotingExecutor()
    drafter = start(executor)
    ready, short, long = request(1, 3), request(2, 7), request(3, 20)
    assert drafter.propose([(ready, 1)]) == [[10]]
    ready.tokens.append(10)
    assert drafter.propose([(long, 1), (ready, 1), (short, 1)]) == [[], [11], [21]]
    assert drafter.propose([(long, 1), (ready, 1), (short, 1)]) == [[], [12], [22]]
