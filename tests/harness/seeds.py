"""Random inputs of tests follow from TEST_SEED: any text, drawn at the start of a run by default.

`make test` sets it to the hash of the tree. One tree then has one verdict, however often it is
tested, and the next draws other inputs. Whoever reads of a failure repeats it with its TEST_SEED.
"""

import contextlib
import os
import random
import sys
from collections.abc import Iterator

# In the environment, so that the processes that tests start draw the same.
TEST_SEED = os.environ.get("TEST_SEED") or str(random.SystemRandom().randrange(10**6))
os.environ["TEST_SEED"] = TEST_SEED


def seed_of(name: str) -> int:
    """A number below 10**6 for what has this name, the same in every process of a run."""
    return random.Random(f"{TEST_SEED} {name}").randrange(10**6)


def fresh_seed() -> int:
    """Another number below 10**6 for each call in a test."""
    return random.randrange(10**6)


def fresh_random() -> random.Random:
    """Another generator for each call in a test."""
    return random.Random(fresh_seed())


def seed_libraries(seed: int) -> None:
    """Seed the generators that Python, NumPy and torch share, where they are imported."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@contextlib.contextmanager
def aside(name: str) -> Iterator[None]:
    """Draw from seeds of this name, and leave behind the generators as they were."""
    python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
    numpy_state = numpy.random.get_state() if numpy else None
    torch_state = torch.get_rng_state() if torch else None
    seed_libraries(seed_of(name))
    try:
        yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpy_state)
        if torch:
            torch.set_rng_state(torch_state)
