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
        self._running: dict[str, list[int]] = {}  # prompt's length, tokens to give, tokens given
        self.most_at_once = 0

    def LLM(self, **options: object) -> "CountingVllm":
        self.options = options
        return self

    def add_request(
        self, row: str, prompt: dict[str, list[int]], sampling: SimpleNamespace
    ) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self._running[row] = [len(self.prompts[-1]), sampling.max_tokens, 0]

    def step(self) -> list[SimpleNamespace]:
        self.most_at_once = max(self.most_at_once, len(self._running))
        outputs = []
        for row, (length, most, given) in list(self._running.items()):
            self._running[row][2] += 1
            if given + 1 == most:
                del self._running[row]
            tokens = SimpleNamespace(token_ids=[7] * (given + 1))
            found = length // 2 if length > 500 else 0
            outputs.append(
                SimpleNamespace(request_id=row, outputs=[tokens], num_cached_tokens=found)
            )
        return outputs

    def shutdown(self) -> None:
        self.is_open = False


def test_conversations_grow_by_their_answers_and_options_are_vllms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = CountingVllm()
    monkeypatch.setitem(sys.modules, "vllm", counting)
    monkeypatch.setattr(os, "environ", {})
    asked = "--duration-s 8 --rounds 1 --host-gib 3 --at-once 2"
    monkeypatch.setattr(sys, "argv", ["bench_host_tier_vllm", *asked.split()])
    main()
    printed = capsys.readouterr().out
    assert "vLLM 0.26.0, conversations, 3 GiB" in printed
    assert "vLLM 0.26.0, all different, 3 GiB" in printed
    assert counting.options["kv_offloading_size"] == 3
    assert counting.options["kv_offloading_backend"] == "native"
    assert any(prompt.count(7) >= 5 for prompt in counting.prompts), "answers are said again"
    assert counting.most_at_once == 2
    assert not counting.is_open
