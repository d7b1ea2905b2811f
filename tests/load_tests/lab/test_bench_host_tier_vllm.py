"""The turns of the host tier's bench on a vLLM that only counts."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from load_tests.lab.bench_host_tier_vllm import main


class CountingVllm(ModuleType):
    """The module and its engine in one: a prompt of more than 500 tokens was seen by half."""

    __version__ = "0.26.0"
    SamplingParams = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("vllm")
        self.options: dict[str, object] = {}
        self.prompts: list[list[int]] = []
        self.is_open = True
        self.llm_engine = self.engine_core = self
        self._most = self._num = 0

    def LLM(self, **options: object) -> "CountingVllm":
        self.options = options
        return self

    def add_request(
        self, row: str, prompt: dict[str, list[int]], sampling: SimpleNamespace
    ) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self._most, self._num = sampling.max_tokens, 0

    def has_unfinished_requests(self) -> bool:
        return self._num < self._most

    def step(self) -> list[SimpleNamespace]:
        self._num += 1
        length = len(self.prompts[-1])
        found = length // 2 if length > 500 else 0
        tokens = SimpleNamespace(token_ids=[7] * self._num)
        return [SimpleNamespace(outputs=[tokens], num_cached_tokens=found)]

    def shutdown(self) -> None:
        self.is_open = False


def test_conversations_grow_by_their_answers_and_options_are_vllms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = CountingVllm()
    monkeypatch.setitem(sys.modules, "vllm", counting)
    monkeypatch.setattr(os, "environ", {})
    asked = "--duration-s 8 --rounds 1 --host-gib 3"
    monkeypatch.setattr(sys, "argv", ["bench_host_tier_vllm", *asked.split()])
    main()
    printed = capsys.readouterr().out
    assert "vLLM 0.26.0, conversations, 3 GiB" in printed
    assert "vLLM 0.26.0, all different, 3 GiB" in printed
    assert counting.options["kv_offloading_size"] == 3
    assert any(prompt.count(7) >= 5 for prompt in counting.prompts), "answers are said again"
    assert not counting.is_open
