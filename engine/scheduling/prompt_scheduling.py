"""Chooses the prompts of one worker's steps: combines its queue, its window and the cost model.

    arrived             a request joins the queue
    must_defer_until_s  whether an idle device should wait for more short prompts
    open_budget         how much prompt work the next step may hold besides its decodes
    queue.candidates    which requests may use the budget, in order
    observe             how long a step took

Built from the parts that `LapsConfig` names. Knows no blocks and no rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from configs.resolved import ResolvedLaps
from engine.cost_model import CostModel, StepWork
from engine.length_class import LengthClass
from engine.messages import ShortLoad
from engine.request import Request
from engine.scheduling.budget import StepBudget, rest_of_prompt
from engine.scheduling.laps import DualQueue
from engine.scheduling.waiting import PromptQueue, WaitingQueue, by_arrival, by_priority
from engine.scheduling.window import AdaptiveWindow, FixedWindow, Gathered, NoWindow, Wait, Window

CLASSES: tuple[LengthClass, LengthClass] = ("short", "long")
_MIN_LONG_CHUNK_TOKENS = 64  # a smaller chunk saves no time: a step's floor dominates


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWork:
    """Predicted work of a worker's queue, for placement."""

    queued_s: float
    short: ShortLoad | None  # None = short prompts do not go first on this worker
    room_s: float = 0.0  # until one more request that is not short would have a row and blocks


class PromptScheduling:
    """The queue of one worker, its window and its cost model; mutated by the engine thread."""

    def __init__(
        self,
        laps: ResolvedLaps,
        *,
        count_uncached: Callable[[Request], int],
        graph_token_sizes: Sequence[int] = (),
    ) -> None:
        """count_uncached: returns the tokens of a waiting request that no cached block covers.

        graph_token_sizes: sizes of prompt steps in tokens, ascending, that need no padding.
        """
        self._laps = laps
        self.graph_token_sizes = graph_token_sizes
        self._model = CostModel()
        self._window = _build_window(laps)
        self.order = by_arrival if laps.queue == "fcfs" else by_priority
        self._dual: DualQueue | None = None
        self.queue: PromptQueue
        if laps.queue == "laps":
            self.queue = self._dual = DualQueue(
                laps,
                model=self._model,
                count_uncached=count_uncached,
                due_of=lambda request: request.first_token_due_s,
            )
        else:
            self.queue = WaitingQueue(self.order)

    @property
    def max_graph_rows(self) -> int:
        """Lines of logits that a graph of a step with prompts has, at most."""
        return self._laps.batch_prefill_max_rows

    @property
    def model(self) -> CostModel:
        """The cost model as fitted so far."""
        return self._model

    def arrived(self, request: Request) -> None:
        """Queue a request, and count its arrival if it is short."""
        self.queue.add(request)
        if self._dual is not None and self._dual.length_class(request.key) == "short":
            self._window.arrived(request.arrival_s)

    def must_defer_until_s(self, now_s: float) -> float | None:
        """Time until which an idle device with no other work should wait; None = start now."""
        if self._dual is None or isinstance(self._window, NoWindow):
            return None
        short = self._dual.statistics("short")
        if short.oldest_arrival_s is None:
            return None
        decision = self._window.decide(
            Gathered(
                num_waiting=short.num_waiting,
                oldest_arrival_s=short.oldest_arrival_s,
                first_due_s=short.first_due_s,
                step_s=self._model.costs.step_seconds(short.work),
                floor_s=self._model.costs.floor_s,
                has_other_work=len(self.queue) > short.num_waiting,
            ),
            now_s,
        )
        return decision.until_s if isinstance(decision, Wait) else None

    def open_budget(
        self, now_s: float, max_tokens: int, decoding: StepWork, *, can_admit: bool
    ) -> StepBudget:
        """The budget of a step for prompts besides `decoding`."""
        is_laps = self._dual is not None
        return StepBudget(
            now_s=now_s,
            max_tokens=max_tokens,
            min_chunk_tokens=_MIN_LONG_CHUNK_TOKENS if is_laps else 1,
            max_step_s=None if self._dual is None else self._dual.max_step_s,
            costs=self._model.costs,
            decoding=decoding,
            can_admit=can_admit,
            graph_token_sizes=self.graph_token_sizes if is_laps else (),
        )

    def observe(self, work: StepWork, duration_s: float) -> None:
        """Update the cost model with a step that kept the device busy for `duration_s`."""
        self._model.observe(work, duration_s)

    def queued_work(self, running: Iterable[Request]) -> QueuedWork:
        """Predicted seconds of all prompts that wait or run; takes time linear in both."""
        if self._dual is None:
            work = StepWork.of_prompts(map(rest_of_prompt, chain(running, self.queue)))
            return QueuedWork(queued_s=self._seconds(work), short=None)
        rest = StepWork.of_prompts(map(rest_of_prompt, running))
        short, long = (self._dual.statistics(name) for name in CLASSES)
        short_s = self._seconds(short.work)
        return QueuedWork(
            queued_s=short_s + self._seconds(long.work.with_work(rest)),
            short=ShortLoad(
                num_waiting=short.num_waiting,
                queued_tokens=short.work.num_prompt_tokens,
                queued_s=short_s,
            ),
        )

    def _seconds(self, work: StepWork) -> float:
        """0 for no work; the cost model would predict the floor for an empty step."""
        return self._model.costs.step_seconds(work) if work.num_new_tokens > 0 else 0.0


def _build_window(laps: ResolvedLaps) -> Window:
    match laps.window:
        case "adaptive":
            return AdaptiveWindow(min_window_s=laps.min_window_s, max_window_s=laps.max_window_s)
        case "fixed":
            return FixedWindow(laps.fixed_window_s, laps.fixed_window_requests)
        case "none":
            return NoWindow()
