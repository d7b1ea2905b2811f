"""The script that trains an EAGLE-3 head: what it unrolls is how heads draft, and it runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo_model.eagle_head import EagleHead
from demo_model.train_eagle import NUM_GUESSES, unrolled
from tests.engine.speculation.eagle_heads import save_head
from tests.harness.in_process import GREEDY, answer, start_engine

SCRIPT = Path(__file__).parents[1] / "demo_model" / "train_eagle.py"


@torch.inference_mode()
def test_the_unrolled_guesses_are_those_of_a_chain(tmp_path: Path) -> None:
    head: EagleHead = save_head(tmp_path, seed=11)
    features, embedded = torch.randn(2, 2, 9, 64)
    states = unrolled(head, features, embedded)
    assert len(states) == NUM_GUESSES
    for entry in range(NUM_GUESSES, 9):
        for guess in range(NUM_GUESSES):
            known = features[:, : entry - guess + 1]  # then the chain's own
            for _ in range(guess):
                made = head(known, embedded[:, : known.shape[1]])
                known = torch.cat([known, made[:, -1:]], dim=1)
            expected = head(known, embedded[:, : entry + 1])[:, -1]
            torch.testing.assert_close(states[guess][:, entry], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_the_script_makes_a_head_that_drafts(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--minutes", "0.01"]
    subprocess.run([*command, "--steps", "2"], check=True, timeout=500)
    engine = start_engine(
        cache__num_blocks=64,
        speculation__drafter="eagle3",
        speculation__model_path=str(tmp_path),
        speculation__adaptive=False,
    )
    plain = start_engine(cache__num_blocks=64)
    asked = [(list(range(40, 60)), GREEDY)]
    assert answer(engine, asked)[0].tokens == answer(plain, asked)[0].tokens
    assert engine.core.scheduler.drafting.counts.num_drafted > 0
