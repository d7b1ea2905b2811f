"""The compiled grammars of one worker: compiled off the engine's thread, kept while there is room.

A request's constraint is compiled before the request is queued (`prepare`), so that the sampler
finds it (`matcher`). It was compiled within its bounds at the edge before it came here.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock

import xgrammar

from engine.constraints.compiling import compile_constraint
from engine.request import Constraint

MAX_GRAMMARS = 256
MAX_GRAMMAR_BYTES = 512 * 2**20  # of all that are kept
NUM_COMPILER_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStatistics:
    """Sizes now, and counters since start."""

    num_grammars: int
    num_bytes: int
    num_compiled: int


class Grammars:
    """An LRU of compiled grammars. Safe to call from several threads."""

    def __init__(
        self,
        load_vocabulary: Callable[[], xgrammar.TokenizerInfo],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        """The vocabulary is loaded with the first constraint: most workers never see one."""
        self._load_vocabulary = load_vocabulary
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._lock = RLock()  # a future that is done already calls back at once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiler: xgrammar.GrammarCompiler | None = None  # of the thread above
        # Least recently used first. A text that cannot be compiled is not kept.
        self._grammars: OrderedDict[Constraint, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._num_compiled = 0

    def prepare(self, constraint: Constraint) -> "Future[xgrammar.CompiledGrammar]":
        """Compile in the background unless that is done or under way; never waits.

        The future raises RequestError for a text that cannot be compiled.
        """
        with self._lock:
            found = self._grammars.get(constraint)
            if found is None:
                found = self._thread.submit(self._compile, constraint)
                self._grammars[constraint] = found
                found.add_done_callback(lambda done: self._settle(constraint, done))
            else:
                self._grammars.move_to_end(constraint)
            return found

    def matcher(self, constraint: Constraint) -> xgrammar.GrammarMatcher:
        """A fresh matcher, before any token.

        Waits for the compiler only if nobody called `prepare` in time, or others took its place.
        """
        return xgrammar.GrammarMatcher(self.prepare(constraint).result())

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

    # ---- on the compiler's thread ---------------------------------------------------------------

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if self._compiler is None:
            self._compiler = xgrammar.GrammarCompiler(
                self._load_vocabulary(), max_threads=NUM_COMPILER_THREADS, cache_enabled=False
            )
        return compile_constraint(self._compiler, constraint)

    def _settle(self, constraint: Constraint, done: "Future[xgrammar.CompiledGrammar]") -> None:
        """Forget what failed, and of the others the least recently used beyond the bounds."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                if self._grammars.get(constraint) is done:
                    del self._grammars[constraint]
                return
            self._num_compiled += 1
            while len(self._grammars) > 1 and self._is_over():
                oldest = next(iter(self._grammars))
                del self._grammars[oldest]

    def _is_over(self) -> bool:
        return len(self._grammars) > self._max_grammars or self._num_bytes() > self._max_bytes

    def _num_bytes(self) -> int:
        return sum(
            future.result().memory_size_bytes
            for future in self._grammars.values()
            if future.done() and not future.cancelled() and future.exception() is None
        )
