"""Train the demonstration model and its draft from the Python standard library's source.

    python demo_model/train.py --out demo_model --minutes 8.3

writes ``laps-demo/`` (the target), ``laps-demo-draft/`` and ``metrics.json`` under ``--out``. The
target learns from the text, the draft from the target. One GPU and a few minutes are enough;
``--steps 2 --device cpu --max-files 30 --batch-tokens 2048`` only shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from corpus import (
    BOS,
    END,
    MAX_CONTEXT,
    Document,
    chat_stream,
    code_stream,
    example_documents,
    fingerprint,
    held_out_documents,
    is_held_out,
    read_documents,
    save_tokenizer,
    token_id,
    train_tokenizer,
)
from scoring import score, score_saved, scoring_windows
from tokenizers import Tokenizer
from training import Limit, Mixture, Recipe, train
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 3072
SHAPES: dict[str, dict[str, Any]] = {
    "laps-demo": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
               "num_attention_heads": 4, "num_key_value_heads": 2},
    "laps-demo-draft": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1},
}  # fmt: skip
DRAFT_SHARE = 0.15  # of the training time
CHAT_SHARE, TEST_SHARE = 0.13, 0.3  # of the rows in a batch


def new_model(name: str, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised Llama of one of ``SHAPES``."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, END),
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Round a copy of the weights to bf16 and save it with its tokenizer."""
    rounded = LlamaForCausalLM(model.config)
    torch.nn.Module.to(rounded, torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--minutes", type=float, default=8.3, help="training time, both models")
    parser.add_argument("--steps", type=int, help="steps of each model, instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=64 * 1024)
    parser.add_argument("--dropout", type=float, default=0.15, help="of the target, in training")
    parser.add_argument("--weight-decay", type=float, default=0.5, help="of the target's matrices")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--max-files", type=int, help="read only this many files (a quick try)")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--corpus", default=f"CPython {platform.python_version()}",
                        help="name of that standard library, for metrics.json")  # fmt: skip
    parser.add_argument("--score-only", action="store_true", help="only score what --out holds")
    return parser.parse_args(argv)


def recipes(args: argparse.Namespace) -> dict[str, tuple[float, Recipe]]:
    """Each model's share of the training time and its recipe; the second learns from the first."""
    target = Recipe(3e-3, args.dropout, args.weight_decay)
    # So small a draft cannot learn the text by heart: it needs no dropout and little decay.
    draft = Recipe(5e-3, dropout=0.0, weight_decay=0.1)
    return {"laps-demo": (1.0 - DRAFT_SHARE, target), "laps-demo-draft": (DRAFT_SHARE, draft)}


def training_mixture(
    tokenizer: Tokenizer, code: list[str], tests: list[str], args: argparse.Namespace
) -> Mixture:
    """The training streams on the training device, with their shares of a batch."""
    files = code + example_documents(copies=len(code) // 20)
    test_share = TEST_SHARE if tests else 0.0
    streams = [(code_stream(tokenizer, files, args.seed), 1.0 - CHAT_SHARE - test_share)]
    if tests:
        streams.append((code_stream(tokenizer, tests, args.seed), test_share))
    streams.append((chat_stream(tokenizer, code + tests, args.seed), CHAT_SHARE))
    for stream, share in streams:
        print(f"stream of {len(stream.tokens):,} tokens, share {share:.2f}")
    device = torch.device(args.device)
    return Mixture([(s.to(device), share) for s, share in streams], args.batch_tokens)


def write_metrics(path: Path, metrics: dict[str, object]) -> None:
    """Write the metrics file, replacing an older one."""
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def read_corpus(args: argparse.Namespace) -> tuple[list[Document], list[Document]]:
    """The training documents and those the models are scored on."""
    documents = read_documents(args.stdlib)
    if args.max_files:
        documents = documents[:: max(1, len(documents) // args.max_files)]
    return [d for d in documents if not is_held_out(d.path)], held_out_documents(documents)


def rescore(args: argparse.Namespace) -> None:
    """Score the saved models again and update their metrics file."""
    _, held_out = read_corpus(args)
    path = args.out / "metrics.json"
    metrics = json.loads(path.read_text()) if path.exists() else {}
    metrics |= score_saved(args.out, held_out, torch.device(args.device))
    metrics["held_out_sha256"] = fingerprint(held_out)
    write_metrics(path, metrics)
    print(json.dumps(metrics, indent=2))


def train_all(args: argparse.Namespace) -> None:
    """Train the target, then the draft from it; save both and their scores."""
    began = time.monotonic()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    training, held_out = read_corpus(args)
    code = [d.text for d in training if not d.is_test]
    tests = [d.text for d in training if d.is_test]
    tokenizer = train_tokenizer(code, VOCAB_SIZE)
    mixture = training_mixture(tokenizer, code, tests, args)
    windows = scoring_windows(tokenizer, held_out)[:128]
    print(f"held out {len(held_out)} files, prepared in {time.monotonic() - began:.0f} s")

    def held_out_loss(model: LlamaForCausalLM) -> float:
        return score(model, tokenizer, windows).loss if windows else 0.0

    metrics: dict[str, object] = {
        "corpus": args.corpus,
        "training_files": len(training),
        "training_bytes": sum(len(d.text.encode()) for d in training),
        "held_out_files": len(held_out),
        "held_out_bytes": sum(len(d.text.encode()) for d in held_out),
        "held_out_sha256": fingerprint(held_out),
        "batch_tokens": args.batch_tokens,
        "seed": args.seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    teacher: LlamaForCausalLM | None = None
    for name, (share, recipe) in recipes(args).items():
        started = time.monotonic()
        model = new_model(name, tokenizer)
        torch.nn.Module.to(model, device)
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        limit = Limit(args.steps, 60 * args.minutes * share)
        steps, best = train(model, recipe, mixture, limit, teacher, held_out_loss, args.compile)
        metrics[f"{name}_steps"] = steps
        metrics[f"{name}_seconds"] = round(time.monotonic() - started)
        metrics[f"{name}_training"] = asdict(recipe) | {
            "checkpoint_at": round(best.at, 3),
            "checkpoint_averaged": best.averaged,
            "checkpoint_loss": round(best.loss, 4),
        }
        save(model, tokenizer, args.out / name)
        write_metrics(args.out / "metrics.json", metrics)
        teacher = model.train(False).requires_grad_(False)
    if held_out:
        metrics |= score_saved(args.out, held_out, device)
    write_metrics(args.out / "metrics.json", metrics)
    print(json.dumps(metrics, indent=2))
    print(f"everything took {time.monotonic() - began:.0f} s")


def main(argv: list[str] | None = None) -> None:
    """Train, or only score what is there."""
    args = parse_arguments(argv)
    if args.score_only:
        rescore(args)
    else:
        train_all(args)


if __name__ == "__main__":
    main()
