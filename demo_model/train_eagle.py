"""Train an EAGLE-3 head for the demonstration model, on its training text and on its own.

    python demo_model/train_eagle.py --out laps-demo-eagle3 --minutes 16

writes a folder in the public format, for ``speculation.drafter: eagle3``. A quarter of the time
samples answers of the target (temperatures 0, 0.7 and 1) to pieces of its training files; the rest
trains on batches of which half are such answers. The head unrolls several guesses, each from its
own hidden states ("training-time test"), against the target's distribution. A CPU is enough.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from corpus import is_held_out, read_documents
from eagle_head import EagleHead
from tokenizers import Tokenizer
from torch import Tensor
from training import Recipe, new_optimizers, rate_at
from transformers import AutoModelForCausalLM, PreTrainedModel

TARGET = Path(__file__).resolve().parent / "laps-demo"
# The layers whose outputs the head reads, as published configurations count them.
LAYERS = (1, 3, 4)
DRAFT_VOCAB_SIZE = 2048
NUM_FILES = 300
PROMPT_TOKENS, ANSWER_TOKENS, BATCH = 64, 128, 8
NUM_GUESSES, LATER_WEIGHT = 3, 0.8  # unrolled; of each guess over that of the one before
RATE = 2e-3


def read_text(stdlib: Path, seed: int) -> Tensor:
    """[N, PROMPT_TOKENS + ANSWER_TOKENS]  pieces of training files, in random order."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    files = [d.text for d in read_documents(stdlib) if not is_held_out(d.path)]
    files = random.Random(seed).sample(files, min(NUM_FILES, len(files)))
    length = PROMPT_TOKENS + ANSWER_TOKENS
    ids = [i for e in tokenizer.encode_batch(files, add_special_tokens=False) for i in e.ids]
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))]


@torch.inference_mode()
def sample_answers(target: PreTrainedModel, prompts: Tensor, temperature: float) -> Tensor:
    """[B, PROMPT_TOKENS + ANSWER_TOKENS]  prompts with what the target goes on with."""
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0}
    made: Tensor = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=ANSWER_TOKENS,
        max_new_tokens=ANSWER_TOKENS,
        pad_token_id=0,
        **sampling,
    )
    return made


def sample_texts(target: PreTrainedModel, text: Tensor, seconds: float) -> Tensor:
    """[N, PROMPT_TOKENS + ANSWER_TOKENS]  the target's answers to pieces of `text`."""
    until, batches = time.monotonic() + seconds, []
    for number, batch in enumerate(text[:, :PROMPT_TOKENS].split(64)):
        batches.append(sample_answers(target, batch, (0.0, 0.7, 1.0)[number % 3]))
        if time.monotonic() > until:
            break
    answers = torch.cat(batches)
    print(f"{answers.numel():,} tokens sampled", flush=True)
    return answers


def new_head(target: PreTrainedModel, text: Tensor) -> EagleHead:
    """An untrained head whose vocabulary is what is most frequent in `text`."""
    config = target.config
    counts = text.flatten().bincount(minlength=config.vocab_size)
    ids = counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values
    print(f"{counts[ids].sum() / counts.sum():.2%} of the tokens are in the head's vocabulary")
    head = EagleHead(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_parameters["rope_theta"],
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            },
        }
    )
    head.d2t.copy_(ids - torch.arange(DRAFT_VOCAB_SIZE))
    _begin_with(head, target, ids)
    return head


@torch.no_grad()
def _begin_with(head: EagleHead, target: PreTrainedModel, ids: Tensor) -> None:
    """Start from the target's own maps: they know what its streams mean, which saves most steps."""
    weights = target.state_dict()
    last = target.config.num_hidden_layers - 1
    head.weight("lm_head").copy_(weights["model.embed_tokens.weight"][ids])
    head.weight("norm").copy_(weights["model.norm.weight"])
    head.weight("fc").zero_()
    head.weight("fc")[:, -target.config.hidden_size :] = torch.eye(target.config.hidden_size)
    for name in (name for name in head.names if name.startswith("midlayer.")):
        published = name.replace("midlayer", f"model.layers.{last}")
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            first = weights[name.replace("midlayer", "model.layers.0")]
            both = torch.cat([first, weights[published]], dim=1)
            head.weight(name.removesuffix(".weight")).copy_(both * 0.5**0.5)
        elif published in weights and name != "midlayer.input_layernorm.weight":
            head.weight(name.removesuffix(".weight")).copy_(weights[published])
    entering = weights[f"model.layers.{last}.input_layernorm.weight"]
    head.weight("midlayer.hidden_norm").copy_(entering)
    head.weight("midlayer.input_layernorm").copy_(weights["model.layers.0.input_layernorm.weight"])


def unrolled(head: EagleHead, features: Tensor, embedded: Tensor) -> list[Tensor]:
    """h of each guess, [B, T, hidden]; in guess j, entry t reads what guess j - 1 made at t - 1.

    It sees the first guess's keys up to t - j, and in each of the places after one of its own
    chain: guess i at t - j + i.
    """
    length, states = features.shape[1], []
    chain: list[tuple[Tensor, Tensor]] = []
    scale = head.head_dim**-0.5
    for guess in range(NUM_GUESSES):
        q, k, v = head.project(features, embedded)
        if guess == 0:
            first_k, first_v = k, v
        else:
            chain.append((k, v))
        scores = q @ first_k.transpose(-1, -2) * scale
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1 - guess)
        scores = scores.masked_fill(ahead, -1e9)
        own = [(q * _later(k_, guess - i)).sum(-1, keepdim=True) * scale
               for i, (k_, _) in enumerate(chain, start=1)]  # fmt: skip
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        attended = weights[..., :length] @ first_v
        for i, (_, v_) in enumerate(chain, start=1):
            column = length + i - 1
            attended = attended + weights[..., column : column + 1] * _later(v_, guess - i)
        states.append(head.finish(features, attended))
        features = _later(states[-1], 1, dim=1)
    return states


def _later(x: Tensor, places: int, dim: int = 2) -> Tensor:
    """x[t - places] at t; zeros where there is none."""
    if places == 0:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - places)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, places)), kept], dim=dim)


def batch_loss(head: EagleHead, target: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[float]]:
    """The loss of `ids` [B, T], and the share of each guess that is the target's first choice."""
    with torch.no_grad():
        out = target(ids, output_hidden_states=True, use_cache=False)
        # What enters layer i + 1 is what leaves layer i.
        entering = torch.cat([out.hidden_states[i + 1] for i in LAYERS], dim=-1)[:, :-1]
        embedded = target.get_input_embeddings()(ids[:, 1:])
        wanted, best = out.logits[:, 1:], out.logits[:, 1:].argmax(-1)
        wanted = wanted[..., head.target_ids].softmax(-1)
    loss, shares = torch.zeros(()), []
    for guess, state in enumerate(unrolled(head, head.features(entering), embedded)):
        counted = slice(guess, None)
        logits = head.logits(state[:, counted])
        divergence = -(wanted[:, counted] * logits.log_softmax(-1)).sum(-1).mean()
        loss = loss + LATER_WEIGHT**guess * divergence
        right = head.target_ids[logits.argmax(-1)] == best[:, counted]
        shares.append(float(right.float().mean()))
    return loss, shares


def train(
    head: EagleHead,
    target: PreTrainedModel,
    sources: list[Tensor],
    seconds: float,
    steps: int | None,
) -> None:
    """Train in place; every source [N, T] has the same share of a batch."""
    optimizers = new_optimizers(head, Recipe(RATE, dropout=0.0, weight_decay=0.01))
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1.0:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * rate_at(progress)
        rows = [s[torch.randint(len(s), (BATCH // len(sources),))] for s in sources]
        loss, shares = batch_loss(head, target, torch.cat(rows))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        done_s = time.monotonic() - started
        progress = step / steps if steps else done_s / seconds
        if step % 25 == 0:
            print(f"{progress:4.0%} step {step} loss {loss.item():.3f} right "
                  + " ".join(f"{share:.3f}" for share in shares), flush=True)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, help="steps of training, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    target.requires_grad_(False)
    text = read_text(args.stdlib, args.seed)
    answers = sample_texts(target, text, 15 * args.minutes)
    head = new_head(target, text)
    train(head, target, [text, answers], 45 * args.minutes, args.steps)
    head.save(args.out, torch.bfloat16)


if __name__ == "__main__":
    main()
