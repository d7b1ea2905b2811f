"""What holds for all tests."""

import gc
import os
import signal
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch and Ray start: the models are tiny, and threads of two test processes that wait for
# each other on two cores take four times as long as one thread of each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of our own, gone with the tests
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# As this process is: Ray would put its workers at 15, near the tests without Ray that give way.
os.environ.setdefault("RAY_worker_niceness", "0")
# As under `serve run` (configs/process_environment.py): on a busy machine a proxy starts slowly.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")

import pytest
from hypothesis import core, settings

from tests.harness.process_logging import kept_logging
from tests.harness.seeds import TEST_SEED, aside, seed_libraries, seed_of

TESTS = Path(__file__).parent
LAB = TESTS / "load_tests" / "lab"

# A machine that is busy with other tests must not look like an example that takes too long.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
core.global_force_seed = seed_of("hypothesis")


def pytest_configure() -> None:
    _end_on_signals()


def _end_on_signals() -> None:
    """End all tests, and what fixtures have started, on SIGTERM as on Ctrl-C.

    Also where a shell has started pytest in the background, which ignores Ctrl-C.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Print where the test stood: it may have waited for a compiler, or for another process."""
    frames = traceback.extract_tb(excinfo.tb)
    of_pytest = [i for i, frame in enumerate(frames) if "_pytest" in Path(frame.filename).parts]
    for line in traceback.format_list(frames[of_pytest[-1] + 1 if of_pytest else 0 :]):
        print(line, end="")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests `make test`, `make test-lab` and `-m gpu` would all deselect.

    Their imports take longer than many a test. A marker's name stands in the file of its tests.
    """
    asked_for = str(config.option.markexpr)
    first = asked_for.partition(" and ")[0]
    if first in ("ray", "gpu", "multi_gpu") and collection_path.suffix == ".py":
        return f"mark.{first}" not in collection_path.read_text() or None
    if collection_path == LAB:
        return "not lab" in asked_for or None
    return None


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """The Ray cluster of all tests that need one, with two GPUs that do not exist."""
    import ray  # takes longer than many a test
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = str(TESTS / "harness" / "setup_worker.py")
    ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    _end_on_signals()  # Ray's handler ends the test that runs, and no other
    yield
    ray.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are imported, later seldom, and not among what they imported.

    Looking as often as Python does by itself takes a twelfth of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(20_000, 20, 20)
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Let no test log as an actor that one before it has made in its process."""
    with kept_logging():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test draw the same inputs whatever ran before it in its process."""
    seed_libraries(seed_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: Any
) -> Generator[None, Any, Any]:
    """Let a fixture that tests share draw the same inputs whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with aside(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with each test that fails how it is repeated, and what became of its actors."""
    report = yield
    if report.failed:
        report.sections.append(("random inputs", f"TEST_SEED={TEST_SEED}"))
    if report.failed and "local_ray" in getattr(item, "fixturenames", ()):
        from load_tests.testbed.actor_states import describe_actors  # imports Ray

        report.sections.append(("actors of Ray", describe_actors(call.start)))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the lab, which `make test-lab` runs when the lab has changed; and let a
    time limit end the whole run where a test may wait for a GPU that never ends.

    NCCL ends no operation whose peer is gone, and a process that waits for one takes no signal.
    FlashInfer's GPU tests come last: it compiles kernels for minutes where its cache has none.
    """
    for item in items:
        if item.path.is_relative_to(LAB):
            item.add_marker("lab")
        if any(map(item.get_closest_marker, ("gpu", "multi_gpu"))):
            limit = item.get_closest_marker("timeout")
            args = () if limit is None else limit.args
            item.add_marker(pytest.mark.timeout(*args, method="thread"), append=False)
    items.sort(key=_compiles_for_minutes)


def _compiles_for_minutes(item: pytest.Item) -> bool:
    return "flashinfer" in item.name and item.get_closest_marker("gpu") is not None
