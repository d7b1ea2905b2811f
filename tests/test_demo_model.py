"""The model that ships with the project: size, form, quality, and that its script still runs."""

import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
FILES = sorted(p for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
METRICS: dict[str, Any] = json.loads((FOLDER / "metrics.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER / "laps-demo")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {
        name: AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
        for name in ("laps-demo", "laps-demo-draft")
    }


def greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, count: int
) -> str:
    step = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    cache, chosen = None, []
    while len(chosen) < count:
        with torch.no_grad():
            output = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
        if step.item() == tokenizer.eos_token_id:
            break
        chosen.append(step.item())
    return str(tokenizer.decode(chosen, skip_special_tokens=False))


def test_the_whole_folder_stays_under_ten_megabytes() -> None:
    assert sum(p.stat().st_size for p in FILES) <= 10_000_000
    assert all(p.stat().st_size <= 250_000 for p in FILES if p.name.startswith("tokenizer"))


@pytest.mark.parametrize("name", ["laps-demo", "laps-demo-draft"])
def test_the_configuration_is_plain_llama_in_bf16(
    name: str, models: dict[str, PreTrainedModel]
) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (config["head_dim"], config["max_position_embeddings"]) == (64, 2048)
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"]
    counted = sum(p.numel() for p in models[name].parameters())
    assert counted == METRICS[name]["parameters"]
    assert f"{counted:,}" in (FOLDER / "MODEL_CARD.md").read_text()


def test_draft_and_target_share_one_vocabulary(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / "laps-demo" / file).read_bytes() == (
            FOLDER / "laps-demo-draft" / file
        ).read_bytes()
    assert {m.config.vocab_size for m in models.values()} == {len(tokenizer)}
    assert {m.config.eos_token_id for m in models.values()} == {tokenizer.eos_token_id}


def test_any_unicode_round_trips(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(7)
    for _ in range(200):
        points = (rng.choice([0x80, 0x800, 0xD800, 0x110000]) for _ in range(rng.randrange(40)))
        text = "".join(chr(rng.randrange(top)) for top in points)
        text = text.encode("utf-8", "ignore").decode()
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be concise."},
        {"role": "user", "content": "Hello"},
    ]
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    assert plain == "<|bos|><|system|>Be concise.<|end|><|user|>Hello<|end|>"
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == plain + "<|assistant|>"
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert ids[:2] == tokenizer.convert_tokens_to_ids(["<|bos|>", "<|system|>"])
    assert tokenizer("Hello")["input_ids"][0] != tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("def add(a, b):\n    return ", "a + b\n\n\ndef subtract(a, b):\n    return a - b\n"),
        ("def reverse_string(s):\n    ", "return s[::-1]\n\n\ndef is_palindrome(s):\n    return"),
        ("import unittest\n\nclass TestFoo(", "unittest.TestCase):"),
        ('if __name__ == "__main__":\n    ', "unittest.main()\n"),
        ("    def __iter__(self):\n        return ", "self\n\n    def __next__(self):\n"),
        ("for key, value in d.", "items():"),
        (
            "class Foo(object):\n    def __init__(self, name):\n        self.",
            "name = name\n\n    def",
        ),
        (
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
            "    def push(self, item):\n        ",
            "self.items.append(item)\n\n    def p",
        ),
        (
            'def read_lines(path):\n    """Return the lines of a file."""\n    ',
            "with open(path) as f:\n        return f.",
        ),
    ],
)
def test_greedy_completions(
    models: dict[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    expected: str,
) -> None:
    assert greedy(models["laps-demo"], tokenizer, prompt, 20).startswith(expected)


def test_a_chat_answer_is_code_and_ends(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    question = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert greedy(models["laps-demo"], tokenizer, text, 40) == "def add(a, b):\n    return a + b"


def test_only_answers_are_learned_from_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import corpus

    tokenizer = corpus.Tokenizer.from_file(str(FOLDER / "laps-demo" / "tokenizer.json"))
    answers = ["def f():\n    return 1<|end|>", "<|end|>", "x = 2\n<|end|>"]
    chat = "<|bos|><|system|>Be brief.<|end|>"
    chat += "".join(f"<|user|>Write {i}.<|end|><|assistant|>{a}" for i, a in enumerate(answers))
    stream = torch.tensor(tokenizer.encode(chat + chat).ids, dtype=torch.int32)
    wanted = corpus.answers_only(tokenizer, stream)
    learned = wanted[wanted != corpus.IGNORED]
    assert tokenizer.decode(learned.tolist(), skip_special_tokens=False) == "".join(answers * 2)
    assert torch.equal(wanted[wanted != corpus.IGNORED], stream[wanted != corpus.IGNORED])


def test_the_card_states_the_measured_loss() -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text()
    for name in ("laps-demo", "laps-demo-draft"):
        assert f"{METRICS[name]['loss']:.3f}" in card
        assert f"{METRICS[name]['bits_per_byte']:.3f}" in card


@pytest.mark.nightly
@pytest.mark.slow
def test_the_held_out_loss_holds_here(
    models: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import corpus
    import scoring

    held_out = corpus.held_out_documents(
        corpus.read_documents(Path(sysconfig.get_paths()["stdlib"]))
    )
    tokenizer = scoring.Tokenizer.from_file(str(FOLDER / "laps-demo" / "tokenizer.json"))
    sample = scoring.scoring_windows(tokenizer, held_out)[: scoring.SAMPLE_WINDOWS]
    same = corpus.fingerprint(held_out) == METRICS["held_out_sha256"]
    for name, bound in (("laps-demo", 2.6), ("laps-demo-draft", 3.9)):
        loss = scoring.score(models[name], tokenizer, sample).loss
        assert loss < bound
        if same:
            assert loss == pytest.approx(METRICS[name]["sample_loss"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_training_script_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "train.py"), "--out", str(tmp_path), "--steps", "2"]
    command += ["--device", "cpu", "--max-files", "12", "--batch-tokens", "256"]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "laps-demo-draft")
    assert model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "laps-demo")) <= model.config.vocab_size
    assert json.loads((tmp_path / "metrics.json").read_text())["laps-demo-draft_steps"] == 2
