"""A test that makes an actor in the tests' process leaves its logging as it was."""

import logging

import pytest

from actors.observability.logs import set_up_logging


@pytest.mark.parametrize("turn", [1, 2])
def test_the_next_test_logs_as_if_no_actor_were_made(
    turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("actors")
    assert logger.propagate
    logger.error("a line of turn %d", turn)
    assert caplog.messages == [f"a line of turn {turn}"]
    set_up_logging()
    assert not logger.propagate
