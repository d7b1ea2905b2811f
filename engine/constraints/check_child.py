"""The child process that tries a constraint before use, within limits on time and memory.

It reads one constraint per line and writes one verdict per line, as JSON texts; "" = accepted. Each
constraint is tried in a fork of the process, which shares the loaded vocabulary. A constraint that
takes too much ends its fork by a signal, which needs no code to run there; the verdict is then
null. The next constraint needs no new start. The process ends when its input ends.
"""

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from engine.constraints.compiling import CompiledGrammar, compile_constraint
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.errors import RequestError
from engine.models.spec import load_spec
from engine.request import Constraint
from kernels.sampling.mask_words import num_mask_words

START_LIMIT_S = 120.0  # for this process, until it accepts constraints
CPU_LIMIT_S = 6.0  # of one constraint
WALL_LIMIT_S = 12.0
BUSY_CPU_S = 1.0  # less CPU time than this at the wall limit means that the machine was busy
STACK_BYTES = 4 * 2**20  # half the stack of a worker's threads
MEMORY_LIMIT_BYTES = 2 * 2**30  # in addition to what the process has when it starts
NUM_TRIED_TOKENS = 64
MAX_MEAN_STEP_S = 0.01  # for one token of one output; all other outputs wait for it
NICENESS = 10  # on a shared core, nine tenths are left to the engine


def main(arguments: Sequence[str]) -> None:
    """arguments: the model's folder."""
    _limit_time(cpu_s=START_LIMIT_S, wall_s=START_LIMIT_S)
    replies = _own_output()
    os.nice(NICENESS)
    folder = Path(arguments[0])
    spec = load_spec(folder)
    vocabulary = load_vocabulary(
        folder, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
    )
    _limit_memory()
    _limit_time(cpu_s=0.0, wall_s=0.0)
    _say(replies, "")
    for line in sys.stdin.buffer:
        constraint = msgspec.json.decode(line, type=Constraint)
        _say(replies, judge_apart(vocabulary, constraint))


def judge_apart(vocabulary: Vocabulary, constraint: Constraint, *, tries: int = 2) -> str | None:
    """The verdict of a fork of this process; None if the constraint ended the fork.

    `tries`: how often to try while a fork is ended before the machine gave it time to compute.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _limit_time(cpu_s=CPU_LIMIT_S, wall_s=WALL_LIMIT_S)
        verdict = _with_half_a_stack(lambda: judge(vocabulary, constraint))
        with os.fdopen(writing, "wb") as channel:
            channel.write(verdict.encode())
        os._exit(0)  # skip the cleanup of the parent's state
    os.close(writing)
    with os.fdopen(reading, "rb") as channel:
        said = channel.read()
    _, status, used = os.wait4(pid, 0)
    if status == 0:
        return said.decode()
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    if tries > 1 and is_late and used.ru_utime + used.ru_stime < BUSY_CPU_S:
        return judge_apart(vocabulary, constraint, tries=tries - 1)
    return None


def _with_half_a_stack(judged: Callable[[], str]) -> str:
    """Run on a small stack: deep nesting overflows the library's stack here before a worker's."""
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(judged).result()


def judge(vocabulary: Vocabulary, constraint: Constraint) -> str:
    """The problem with the constraint, as a message for the client; "" = none. No time limit."""
    try:
        grammar = compile_constraint(vocabulary, constraint)
    except RequestError as error:
        return error.message
    except MemoryError:
        return f"The constraint on the output ({constraint.kind.value}) takes too much memory."
    problem = _try(grammar)
    return f"The constraint on the output ({constraint.kind.value}) {problem}." if problem else ""


def _try(grammar: CompiledGrammar) -> str:
    """Follow a random output for some tokens: does it reach a dead end, and is it fast enough?"""
    matcher = grammar.matcher()
    vocab_size = grammar.vocabulary.vocab_size
    mask = np.zeros(num_mask_words(vocab_size), dtype=np.int32)
    draw = random.Random(0)
    spent_s = 0.0
    for position in range(NUM_TRIED_TOKENS):
        started_s = time.process_time()
        matcher.fill_next_token_words(mask)
        spent_s += time.process_time() - started_s
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        allowed = np.flatnonzero(bits)
        going_on = np.setdiff1d(allowed, grammar.vocabulary.eos_token_ids)
        if len(allowed) == 0 and matcher.is_beyond_limits:
            return "takes too much to follow: it can be read in too many ways"
        if len(allowed) == 0:
            return "can come to a point where nothing may follow"
        if len(going_on) == 0:
            return "allows nothing but an empty output" if position == 0 else ""
        started_s = time.process_time()
        matcher.accept_token(int(draw.choice(going_on)))
        spent_s += time.process_time() - started_s
    if spent_s > NUM_TRIED_TOKENS * MAX_MEAN_STEP_S:
        return "takes too long to follow: it can be read in too many ways"
    return ""


def _limit_time(*, cpu_s: float, wall_s: float) -> None:
    """Both signals end the process at once, even inside the compiler; 0 = no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory() -> None:
    """Limit private writable memory; address space alone costs nothing."""
    status = Path("/proc/self/status").read_text()
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if line[:7] == "VmData:")
    limit_bytes = used_kib * 1024 + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _own_output() -> BinaryIO:
    """The stream for verdicts; whatever a library prints goes to stderr instead."""
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def _say(replies: BinaryIO, verdict: str | None) -> None:
    replies.write(msgspec.json.encode(verdict) + b"\n")
    replies.flush()
