"""The process that tries a constraint out before anything depends on it, within time and memory.

One constraint a line comes in, one verdict a line goes out: JSON texts, "" = it will do. Each is
tried in a copy of the process (a fork, which has the vocabulary at once). A constraint that takes
too much ends its copy, by signals that no code there has to stay alive for: the verdict is null
then, and the next constraint waits for no new start. The process ends with its input.
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
import torch

from engine.constraints.compiling import CompiledGrammar, compile_constraint
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.errors import RequestError
from engine.models.spec import load_spec
from engine.request import Constraint
from kernels.sampling.token_mask import num_mask_words

START_LIMIT_S = 120.0  # of this process, until it takes constraints
CPU_LIMIT_S = 6.0  # of one constraint
WALL_LIMIT_S = 12.0
BUSY_CPU_S = 1.0  # less than that within the wall's limit, and the machine had no time for it
STACK_BYTES = 4 * 2**20  # half of what threads of a worker have
MEMORY_LIMIT_BYTES = 2 * 2**30  # beyond what the process has when it starts
NUM_TRIED_TOKENS = 64
MAX_MEAN_STEP_S = 0.01  # of one token of one output, in which every other output waits
NICENESS = 10  # on a core that it shares, nine tenths are left to the engine


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
    """The verdict of a copy of this process, which may die of it; None when it does.

    `tries`: at most, as long as a copy was ended before the machine let it compute.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _limit_time(cpu_s=CPU_LIMIT_S, wall_s=WALL_LIMIT_S)
        verdict = _with_half_a_stack(lambda: judge(vocabulary, constraint))
        with os.fdopen(writing, "wb") as channel:
            channel.write(verdict.encode())
        os._exit(0)  # nothing of this process is the copy's to clean up
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
    """Grammars that nest deeply end the library by their depth: here sooner than in a worker."""
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(judged).result()


def judge(vocabulary: Vocabulary, constraint: Constraint) -> str:
    """Returns what is wrong with a constraint, for the client; "" = nothing. Bounds no time."""
    try:
        grammar = compile_constraint(vocabulary, constraint)
    except RequestError as error:
        return error.message
    except MemoryError:
        return f"The constraint on the output ({constraint.kind.value}) takes too much memory."
    problem = _try(grammar)
    return f"The constraint on the output ({constraint.kind.value}) {problem}." if problem else ""


def _try(grammar: CompiledGrammar) -> str:
    """Follow a random output for a while, as slowly as it ends: can it go on, and how fast?"""
    matcher = grammar.matcher()
    vocab_size = grammar.vocabulary.vocab_size
    mask = torch.zeros((1, num_mask_words(vocab_size)), dtype=torch.int32)
    draw = random.Random(0)
    spent_s = 0.0
    for position in range(NUM_TRIED_TOKENS):
        started_s = time.process_time()
        matcher.fill_next_token_bitmask(mask)
        spent_s += time.process_time() - started_s
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
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
    """Limits CPU and wall time by signals that end the process anywhere; 0 = no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory() -> None:
    """Limits private writable memory; reserved address space costs nothing."""
    status = Path("/proc/self/status").read_text()
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if line[:7] == "VmData:")
    limit_bytes = used_kib * 1024 + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _own_output() -> BinaryIO:
    """Opens the stream of verdicts and sends what libraries print to stderr."""
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def _say(replies: BinaryIO, verdict: str | None) -> None:
    replies.write(msgspec.json.encode(verdict) + b"\n")
    replies.flush()
