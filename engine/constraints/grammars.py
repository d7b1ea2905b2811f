"""Compiles the grammars of one worker off the engine's thread and caches them.

A request's constraint is compiled before the request is queued (`prepare`), so that the sampler
finds it (`matcher`), however long the request waits and however often it is preempted: a grammar is
kept while the `Constraint` record passed to `prepare` lives, and the request holds that record. The
edge has compiled every constraint before, within limits on time and memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from weakref import finalize

from engine.constraints.compiling import CompiledGrammar, GrammarMatcher, compile_constraint
from engine.constraints.vocabulary import Vocabulary
from engine.request import Constraint

MAX_GRAMMARS = 256
MAX_TEXT_BYTES = 16 * 2**20  # of all grammars kept; those of live requests may exceed it


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStatistics:
    """Current sizes, and counters since start."""

    num_grammars: int
    num_bytes: int  # of the grammars' texts, which determine their memory
    num_compiled: int


class Grammars:
    """An LRU of compiled grammars. Safe to call from several threads."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        """The vocabulary is loaded with the first constraint, because most workers get none."""
        self._load_vocabulary = load_vocabulary
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        # Reentrant: a future that is done calls back at once, and a finalizer may run anywhere.
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._vocabulary: Vocabulary | None = None  # used by that thread only
        # Least recently used first. A failed compilation is not kept.
        self._grammars: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._held: dict[int, Constraint] = {}  # id of a live record -> an equal record
        self._num_held: Counter[Constraint] = Counter()  # live records equal to it
        self._num_compiled = 0

    def prepare(self, constraint: Constraint) -> "Future[CompiledGrammar]":
        """Compile in the background unless that is done or under way; never waits.

        The grammar is kept while `constraint`, this very object, lives. The future raises
        RequestError for a text that cannot be compiled.
        """
        with self._lock:
            equal = self._hold(constraint)
            found = self._grammars.get(equal)
            if found is None:
                found = self._thread.submit(self._compile, equal)
                self._grammars[equal] = found
                found.add_done_callback(lambda done: self._settle(equal, done))
            else:
                self._grammars.move_to_end(equal)
            return found

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A new matcher, before any token.

        Waits for the compiler only if `prepare` was not called in time.
        """
        return self.prepare(constraint).result().matcher()

    def statistics(self) -> GrammarStatistics:
        with self._lock:
            return GrammarStatistics(
                num_grammars=len(self._grammars),
                num_bytes=self._num_bytes(),
                num_compiled=self._num_compiled,
            )

    def close(self) -> None:
        """Stop the thread after the grammar that it is compiling."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _hold(self, constraint: Constraint) -> Constraint:
        """Keep the grammar until the record is gone; returns an equal one, which keeps nothing."""
        known = self._held.get(id(constraint))
        if known is not None:
            return known
        equal = Constraint(constraint.kind, constraint.text)
        self._held[id(constraint)] = equal
        self._num_held[equal] += 1
        finalize(constraint, self._let_go, id(constraint)).atexit = False
        return equal

    def _let_go(self, record_id: int) -> None:
        with self._lock:
            equal = self._held.pop(record_id)
            self._num_held[equal] -= 1
            if not self._num_held[equal]:
                del self._num_held[equal]
            self._forget_oldest()

    # ---- on the compiler's thread ---------------------------------------------------------------

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        return compile_constraint(self._vocabulary, constraint)

    def _settle(self, constraint: Constraint, done: "Future[CompiledGrammar]") -> None:
        """Drop a failed grammar, or after a success the oldest ones that exceed the limits."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                if self._grammars.get(constraint) is done:
                    del self._grammars[constraint]
                return
            self._num_compiled += 1
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop grammars that no live record holds while limits are exceeded; keeps the newest."""
        for constraint in list(self._grammars)[:-1]:
            if not self._is_over():
                break
            if constraint not in self._num_held:
                self._grammars.pop(constraint, None)  # a finalizer may have removed it meanwhile

    def _is_over(self) -> bool:
        return len(self._grammars) > self._max_grammars or self._num_bytes() > self._max_bytes

    def _num_bytes(self) -> int:
        return sum(
            future.result().num_text_bytes
            for future in self._grammars.values()
            if future.done() and not future.cancelled() and future.exception() is None
        )
