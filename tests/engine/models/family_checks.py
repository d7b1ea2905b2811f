"""What tests ask of every family: transformers' logits and tokens, however its model is run.

The models are in fp32 on a CPU, in folders that `tests/harness/tiny_models.py` has written.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.models.registry import build_model
from engine.request import SamplingParams
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import random_tokens, reference_logits


def _driver(folder: Path, seed: int) -> StepDriver:
    model = build_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    return StepDriver(model, seed=seed)


def check_chunks(folder: Path, seed: int, chunks: Iterable[int]) -> None:
    """A prompt of 19 tokens has the reference's logits in chunks of each of these sizes."""
    token_ids = random_tokens(19, seed)
    theirs = reference_logits(folder, token_ids)
    driver = _driver(folder, seed)
    for chunk in chunks:
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, chunk)
        assert_same_logits(ours, theirs, label=f"chunks of {chunk}")
        driver.release(0)


def check_prefix_hit_and_preemption(folder: Path, seed: int) -> None:
    """A row has the reference's logits on another's blocks, and anew beside a third one."""
    driver = _driver(folder, seed)
    shared = random_tokens(12, seed)
    driver.admit(0, shared + random_tokens(4, seed + 1))
    driver.logits({0: 16})
    follower = shared + random_tokens(9, seed + 2)
    theirs = reference_logits(folder, follower)
    driver.admit(1, follower, shared_blocks=driver.blocks[0][:3], num_computed=12)
    assert_same_logits(driver.logits({1: 5})[1], theirs[12:17])
    driver.release(1)
    other = random_tokens(17, seed + 3)
    driver.admit(2, other)
    driver.admit(1, follower, num_prompt_tokens=15)
    mixed = driver.logits({1: 20, 2: 17})
    assert_same_logits(mixed[1], theirs[:20])
    assert_same_logits(mixed[2], reference_logits(folder, other))
    assert_same_logits(driver.logits({1: 1})[1], theirs[20:])


def check_answers(
    folder: Path, prompts: list[list[int]], num_tokens: int, **settings: object
) -> None:
    """An engine in small steps brings transformers' best tokens, and from its cache once more."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    engine = start_engine(
        model__path=str(folder), cache__num_blocks=40, cache__block_size=4,
        scheduler__max_num_batched_tokens=8, scheduler__max_num_seqs=4, **settings,
    )  # fmt: skip
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    for _ in range(2):  # the second time from the cache
        found = answer(engine, [(prompt, params) for prompt in prompts])
        assert [answered.tokens for answered in found] == expected
