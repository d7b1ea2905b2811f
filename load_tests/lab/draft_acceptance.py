"""How many drafts the shipped model accepts: from the shipped draft, and from n-grams.

    python -m load_tests.lab.draft_acceptance
    python -m load_tests.lab.draft_acceptance --prompts 96 --tokens 256 --drafts 8
    python -m load_tests.lab.draft_acceptance --speed       # of n-grams, on 100,000 tokens of text

The target answers the beginnings of held-out files (`demo_model/corpus.py`), at each temperature,
with the named noise of the engine: token = argmax(log p + gumbel(seed, index, token)). Then
attempts walk through the answers: so many drafts, what is accepted, one token more, the next
attempt. A draft is judged only if all before it were accepted, so a draft model's choice depends on
the answer alone, and one pass over it gives all choices.

    argmax     the draft's most likely token
    coupled    the draft's sample with the target's noise, as the engine drafts
    at best    sum of min(p, q): what no rule of acceptance can exceed, for the first position
    n-gram     `NgramDrafter` on the prompt and the answer so far; + answers: and those before it
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.load import PROJECT_ROOT
from engine.speculation.ngram import NgramDrafter, NgramRules
from engine.text.tokenizing import load_tokenizer
from kernels.sampling.noise import gumbel
from load_tests.lab.quant_accuracy import held_out_windows
from load_tests.prompts import CHARS_PER_TOKEN, SourceText
from load_tests.tables import render_rows

MODELS = PROJECT_ROOT / "demo_model"
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
CORPUS_RULES = NgramRules()
OWN_RULES = NgramRules(max_corpus_tokens=0)
# From (request, tokens of its answer so far) to its drafts.
Propose = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts of a walk through all answers."""

    num_judged: list[int]  # [num_drafts] by position
    num_accepted: list[int]
    num_drafts: int  # proposed
    num_attempts: int  # with a draft or without
    num_tokens: int

    def row(self, name: str) -> list[str]:
        pairs = zip(self.num_accepted, self.num_judged, strict=True)
        return [
            name,
            f"{sum(self.num_accepted) / max(sum(self.num_judged), 1):.3f}",
            *(f"{a / j:.2f}" if j else "-" for a, j in pairs),
            f"{self.num_tokens / self.num_attempts:.2f}",
            f"{1 - sum(self.num_accepted) / max(self.num_drafts, 1):.0%}",
        ]


def walk(
    answers: Sequence[Sequence[int]],
    propose: Propose,
    num_drafts: int,
    finish: Callable[[int], None] = lambda request: None,
) -> Acceptance:
    """Answer each request by attempts, one request after another."""
    judged, accepted = [0] * num_drafts, [0] * num_drafts
    num_proposed = num_attempts = num_tokens = 0
    for request, answer in enumerate(answers):
        at = 0
        while at < len(answer):
            drafts = propose(request, at)[: min(num_drafts, len(answer) - at - 1)]
            num = 0
            for position, draft in enumerate(drafts):
                judged[position] += 1
                if draft != answer[at + position]:
                    break
                accepted[position] += 1
                num += 1
            num_proposed += len(drafts)
            num_attempts += 1
            at += num + 1
        num_tokens += len(answer)
        finish(request)
    return Acceptance(
        num_judged=judged,
        num_accepted=accepted,
        num_drafts=num_proposed,
        num_attempts=num_attempts,
        num_tokens=num_tokens,
    )


class Chooser:
    """Chooses tokens from logits as the engine does, for one request a row."""

    def __init__(self, num_requests: int, vocab_size: int, temperature: float) -> None:
        self._seeds = torch.arange(num_requests, dtype=torch.int64) * 7919 + 1
        self._token_ids = torch.arange(vocab_size)
        self._temperature = temperature

    def choose(self, logits: Tensor, index: int) -> Tensor:
        """[R] the token at output `index` of each request, from its logits [R, vocab]."""
        if self._temperature == 0.0:
            return logits.argmax(-1)
        indices = torch.full_like(self._seeds, index)
        noise = gumbel(self._seeds, indices, self._token_ids)
        return (self.log_probabilities(logits) + noise).argmax(-1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / self._temperature, dim=-1)


def load(folder: Path) -> Any:  # noqa: ANN401  (transformers has no types)
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


def answer(target: Any, prompts: Tensor, num_tokens: int, chooser: Chooser) -> Tensor:  # noqa: ANN401
    """[R, num_tokens] of the target, for prompts [R, P]; an end of sequence ends nothing."""
    out = target(prompts, use_cache=True)
    tokens = [chooser.choose(out.logits[:, -1], 0)]
    while len(tokens) < num_tokens:
        out = target(tokens[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(chooser.choose(out.logits[:, -1], len(tokens)))
    return torch.stack(tokens, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's answers at one temperature, and the draft model's choices along them."""

    prompts: list[list[int]]
    tokens: list[list[int]]  # [R][N]
    argmax: list[list[int]]  # [R][N] the draft's, after the prompt and the tokens before
    coupled: list[list[int]]
    overlap: float | None  # mean of sum min(p, q); None = greedy


def study(target: Any, draft: Any, prompts: Tensor, num_tokens: int, t: float) -> Answers:  # noqa: ANN401
    """Answer the prompts [R, P] at temperature `t`, and let the draft choose along the answers."""
    chooser = Chooser(len(prompts), target.config.vocab_size, t)
    with torch.inference_mode():
        tokens = answer(target, prompts, num_tokens, chooser)
        text = torch.cat([prompts, tokens], dim=1)
        places = slice(prompts.shape[1] - 1, text.shape[1] - 1)
        drafted = draft(text).logits[:, places]  # [R, N, vocab]
        choices = [chooser.choose(drafted[:, i], i) for i in range(num_tokens)]
        overlap = None
        if t > 0.0:
            p = chooser.log_probabilities(target(text).logits[:, places]).exp()
            q = chooser.log_probabilities(drafted).exp()
            overlap = float(torch.minimum(p, q).sum(-1).mean())
    return Answers(
        prompts=prompts.tolist(),
        tokens=tokens.tolist(),
        argmax=drafted.argmax(-1).tolist(),
        coupled=torch.stack(choices, dim=1).tolist(),
        overlap=overlap,
    )


def walk_ngrams(answers: Answers, rules: NgramRules, num_drafts: int) -> Acceptance:
    """The same with n-grams; answers are kept if the rules have room for any."""
    drafter = NgramDrafter(rules)

    def propose(request: int, at: int) -> list[int]:
        known = answers.prompts[request] + answers.tokens[request][:at]
        return drafter.propose(request, known, num_drafts)

    def finish(request: int) -> None:
        drafter.forget(request)
        drafter.add_finished(answers.tokens[request])

    return walk(answers.tokens, propose, num_drafts, finish)


def along(choices: Sequence[Sequence[int]]) -> Propose:
    """Proposes what was chosen at each place of the answers."""
    return lambda request, at: choices[request][at:]


def rows(answers: Answers, t: float, num_drafts: int) -> list[list[str]]:
    """The lines of one temperature."""
    found = []
    for name, choices in (("argmax", answers.argmax), ("coupled", answers.coupled)):
        walked = walk(answers.tokens, along(choices), num_drafts)
        found.append([f"{t:g}", *walked.row(f"draft model, {name}")])
    if answers.overlap is None:
        found.pop()  # greedy: both choices are the same
    else:
        blank = ["-"] * (num_drafts + 2)
        found.append([f"{t:g}", "draft model, at best", f"{answers.overlap:.3f}", *blank])
    for name, rules in (("n-gram", OWN_RULES), ("n-gram + answers", CORPUS_RULES)):
        found.append([f"{t:g}", *walk_ngrams(answers, rules, num_drafts).row(name)])
    return found


def print_speed(num_tokens: int = 100_000, num_drafts: int = 4) -> None:
    """Print how long `NgramDrafter` takes to index a text, and then for each proposal in it."""
    tokenizer = load_tokenizer(MODELS / "laps-demo")
    rng = random.Random(0)
    source = SourceText().slice(CHARS_PER_TOKEN * num_tokens, rng)
    (ids,) = tokenizer.encode_batch([source], add_special_tokens=False)
    assert isinstance(ids, list), ids
    text = ids[: num_tokens + 2000]
    drafter = NgramDrafter()
    num_answers = 400
    for i in range(num_answers):
        drafter.add_finished(text[i * 200 : i * 200 + 512])
    started_s = time.perf_counter()
    drafter.extend("text", text[:num_tokens])
    print(f"index {num_tokens} tokens: {1e3 * (time.perf_counter() - started_s):.1f} ms")
    took_s = []
    for end in range(num_tokens + 1, len(text) + 1):
        known = text[:end]
        started_s = time.perf_counter()
        drafter.propose("text", known, num_drafts)
        took_s.append(time.perf_counter() - started_s)
    p50, p99 = np.quantile(took_s, [0.5, 0.99])
    print(f"propose after each of {len(took_s)} tokens: p50 {1e6 * p50:.1f} us, ", end="")
    print(f"p99 {1e6 * p99:.1f} us; {drafter.statistics()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance of drafts by the shipped model.")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--drafts", type=int, default=4, help="of an attempt")
    parser.add_argument("--speed", action="store_true", help="of n-grams, instead")
    options = parser.parse_args()
    if options.speed:
        print_speed()
        return
    windows = held_out_windows(options.prompts)
    prompts = torch.tensor([window[: options.prompt_tokens] for window in windows])
    target, draft = load(MODELS / "laps-demo"), load(MODELS / "laps-demo-draft")
    positions = [f"draft {i + 1}" for i in range(options.drafts)]
    table = [["T", "drafts", "accepted", *positions, "tokens a step", "wasted"]]
    for t in TEMPERATURES:
        table += rows(study(target, draft, prompts, options.tokens, t), t, options.drafts)
    print(f"{len(prompts)} prompts of {prompts.shape[1]} tokens, answers of {options.tokens}\n")
    print(render_rows(table))


if __name__ == "__main__":
    main()
