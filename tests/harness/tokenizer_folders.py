"""Small tokenizers of the two families in use, written as Hugging Face folders."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The quick brown fox jumps over the lazy dog. It's 10:45, isn't it?",
    "def f(x):\n    return x + 1  # two  spaces\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "敏捷的棕色狐狸跳过了懒狗。今日は良い天気ですね。",
    "Эй, жлоб! Где туз? Прячь юных съёмщиц в шкаф.",
]
CHATML = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}"
    "{{ raise_exception('This role is not for you.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix | default('') }}{% endif %}"
)


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain | config))
    return folder


def byte_level_folder(
    folder: Path,
    *,
    chat_template: str | None = CHATML,
    adds_bos: bool = False,
    adds_eos: bool = False,
) -> Path:
    """GPT-2's kind: byte-level BPE, every byte in the vocabulary, ChatML special tokens.

    adds_eos: as Qwen3-Embedding's tokenizer does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Not special: stays visible. Written in characters outside the byte alphabet, or mixed.
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("\uff5c工具\uff5c"), AddedToken("a b")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    if adds_eos:
        end = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), end])
    config: dict[str, object] = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return _write(folder, tokenizer, config)


def llama_like_folder(folder: Path, *, adds_bos: bool = True, strips: bool = True) -> Path:
    """Llama 2's kind: "▁" for spaces, characters outside the vocabulary as byte tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(LINES[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate([*specials, *byte_tokens, *model["vocab"]])}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens(specials)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return _write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})


def metaspace_folder(folder: Path) -> Path:
    """Sentencepiece's kind: "▁" put before the first word, and taken away by the decoder."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False),
    )
    return _write(folder, tokenizer, {"eos_token": "</s>", "unk_token": "<unk>"})
