"""Processes of a test that have a GPU each keep to those that the tests may use."""

import os

import pytest

from tests.actors.kv_transfer.two_processes import see_one_gpu


@pytest.mark.parametrize(
    ("given", "seen"), [("2,3", "3"), ("GPU-6f1e,GPU-90ab", "GPU-90ab"), (None, "1")]
)
def test_a_process_sees_one_of_the_gpus_that_it_was_given(
    given: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "unknown")  # so that the change is undone
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    see_one_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
