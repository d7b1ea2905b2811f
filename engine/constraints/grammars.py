"""The compiled grammars of one worker: compiled off the engine's thread, kept while there is room.

A request's constraint is compiled before the request is queued (`prepare`), so that the sampler
finds it (`matcher`), however long the request waits and however often it comes back: a grammar is
kept while the record lives that it was prepared for, which its request has. It was compiled within
its bounds at the edge before it came here.
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
MAX_TEXT_BYTES = 16 * 2**20  # of all that are kept, but for those of live requests


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStatistics:
    """Sizes now, and counters since start."""

    num_grammars: int
    num_bytes: int  # of their texts, from which their memory grows
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
        """The vocabulary is loaded with the first constraint: most workers never see one."""
        self._load_vocabulary = load_vocabulary
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        # A future that is done already calls back at once, and a record may be let go anywhere.
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._vocabulary: Vocabulary | None = None  # of the thread above
        # Least recently used first. A text that cannot be compiled is not kept.
        self._grammars: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._held: dict[int, Constraint] = {}  # id of a live record -> an equal one
        self._num_held: Counter[Constraint] = Counter()  # live records equal to it
        self._num_compiled = 0

    def prepare(self, constraint: Constraint) -> "Future[CompiledGrammar]":
        """Compile in the background unless that is done or under way; never waits.

        What comes of it is kept while this very record lives. The future raises RequestError for a
        text that cannot be compiled.
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
        """A fresh matcher, before any token.

        Waits for the compiler only if nobody called `prepare` in time.
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
        """Ends the thread once its grammar is compiled."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _hold(self, constraint: Constraint) -> Constraint:
        """Keep its grammar until the record is gone; returns an equal one, which holds nothing."""
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
        """Forget what failed, or what it has no room beside."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                if self._grammars.get(constraint) is done:
                    del self._grammars[constraint]
                return
            self._num_compiled += 1
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drops the oldest grammars that no record holds, while there are too many."""
        for constraint in list(self._grammars)[:-1]:
            if not self._is_over():
                break
            if constraint not in self._num_held:
                self._grammars.pop(constraint, None)  # a record let go meanwhile may have done it

    def _is_over(self) -> bool:
        return len(self._grammars) > self._max_grammars or self._num_bytes() > self._max_bytes

    def _num_bytes(self) -> int:
        return sum(
            future.result().num_text_bytes
            for future in self._grammars.values()
            if future.done() and not future.cancelled() and future.exception() is None
        )
