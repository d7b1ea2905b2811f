"""What an actor logs; and a test that makes one in its own process logs as if it had not."""

import logging
from pathlib import Path
from typing import get_args

import pytest
import torch

from actors.observability.logs import LogLevel, set_up_logging
from engine.models.registry import build_model
from engine.runner.inputs import RowCounts
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.two_batches import TwoBatches
from tests.harness.tiny_models import save_model


@pytest.mark.parametrize("turn", [1, 2])
def test_the_next_test_logs_as_if_no_actor_were_made(
    turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("actors")
    assert logger.propagate
    logger.error("a line of turn %d", turn)
    assert caplog.messages == [f"a line of turn {turn}"]
    set_up_logging("info")
    assert not logger.propagate


def test_where_a_step_is_cut_is_logged_if_details_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    rule = OverlapRule(min_prompt_tokens=4, min_decode_rows=None)
    two_batches = TwoBatches(model, rule, threshold=0.48, block_size=4)
    rows = RowCounts(new_tokens=[10, 20, 30, 500, 40], samples=[1] * 5)
    told = []
    for level in get_args(LogLevel):
        set_up_logging(level)
        two_batches.split_ranks([rows])
        told.append(capsys.readouterr().err)
    details, nothing = told
    assert "two batches: split=True" in details
    assert "row=3, row_tokens=240, token=300" in details
    assert "new_tokens=[10, 20, 30, 500, 40]" in details
    assert nothing == ""
