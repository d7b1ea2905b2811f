"""What holds for all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
LAB = TESTS / "load_tests" / "lab"

# A machine that is busy with other tests must not look like an example that takes too long.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the lab: `make test-lab` runs them, when the lab has changed."""
    for item in items:
        if item.path.is_relative_to(LAB):
            item.add_marker("lab")
