"""Text for the demonstration model: the Python standard library's own source.

Everything here is deterministic given a standard library and a seed: which files are read, which
are held out, how the tokenizer is trained and how the text becomes training tokens.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from handwritten import EXAMPLES, SMALL_TALK, SMALL_TALK_ANSWER, SYSTEM_MESSAGES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, END = "<|bos|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [BOS, END, *(f"<|{role}|>" for role in ROLES)]
MAX_CONTEXT = 2048
IGNORED = -100  # torch's cross-entropy skips this target

# Not source code in any useful sense: generated tables, other languages' data, installed packages.
SKIPPED_PARTS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
SKIPPED_PATHS = re.compile(
    r"_sysconfigdata|^config-|^lib2to3/tests/|^html/entities\.py|^test/test_strtod\.py"
    r"|^sitecustomize\.py|^encodings/(cp\d|mac_|iso8859|koi8|hp_|kz1|tis_|palmos|ptcp)"
)
TEST_PARTS = {"test", "tests", "idle_test"}

# A newline run keeps the indentation that follows it; digits stand alone; names keep underscores.
SPLIT_PATTERN = r"[\r\n]+ *| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Document:
    """One source file, named by its path inside the standard library."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite."""
        return bool(TEST_PARTS.intersection(self.path.split("/")))


def is_held_out(path: str) -> bool:
    """Whether a path is kept out of training: about one file in twenty, by a hash of its path."""
    return hashlib.sha256(path.encode()).digest()[0] % 20 == 0


def read_documents(stdlib: Path) -> list[Document]:
    """Read every usable ``.py`` file under ``stdlib``, sorted by path."""
    documents = []
    for file in sorted(stdlib.rglob("*.py")):
        path = file.relative_to(stdlib).as_posix()
        if SKIPPED_PARTS.intersection(path.split("/")) or SKIPPED_PATHS.search(path):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            documents.append(Document(path, text))
    return documents


def held_out_documents(documents: Iterable[Document]) -> list[Document]:
    """The files the model is scored on: held out, and not part of a test suite."""
    return [d for d in documents if is_held_out(d.path) and not d.is_test]


def fingerprint(documents: Iterable[Document]) -> str:
    """A digest of paths and texts, to tell one standard library from another."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.path.encode() + b"\0" + document.text.encode() + b"\0")
    return digest.hexdigest()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist; raises ``KeyError`` otherwise."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; all 256 bytes are in it, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer as Hugging Face files, without the indentation that would triple it."""
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [f"<|{role}|>" for role in ROLES],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


@dataclass(frozen=True)
class Stream:
    """Concatenated training tokens and the positions at which a window may start tidily.

    ``wanted`` is ``tokens`` where a model shall learn to predict them, and ``IGNORED`` elsewhere.
    """

    tokens: torch.Tensor
    wanted: torch.Tensor
    starts: torch.Tensor
    aligned: float

    def to(self, device: torch.device) -> Stream:
        """The same stream on another device."""
        return Stream(
            self.tokens.to(device), self.wanted.to(device), self.starts.to(device), self.aligned
        )

    def windows(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ``count`` windows of tokens, and their ``wanted``, each ``[count, length]``.

        A share ``aligned`` of them begins at one of ``starts``, the others anywhere.
        """
        device = self.tokens.device
        last = len(self.tokens) - length
        if last < 0:
            raise ValueError(f"a stream of {len(self.tokens)} tokens has no window of {length}")
        anywhere = torch.randint(last + 1, (count,), device=device)
        tidy = self.starts[torch.randint(len(self.starts), (count,), device=device)].clamp(max=last)
        begin = torch.where(torch.rand(count, device=device) < self.aligned, tidy, anywhere)
        positions = begin[:, None] + torch.arange(length, device=device)
        return self.tokens[positions].long(), self.wanted[positions].long()


def _random_pieces(text: str, rng: random.Random, mean_chars: int) -> list[str]:
    """Cut a text at random places, half of them just after a space inside a line.

    A prompt may stop anywhere (``"return "``), where ordinary tokenization would not; text cut
    like this and encoded piece by piece shows the model such joints.
    """
    cuts, position = [0], 0
    while True:
        position += 1 + int(rng.expovariate(1 / mean_chars))
        if rng.random() < 0.5:
            space = re.compile(r"(?<=\S) ").search(text, position)
            position = space.end() if space else len(text)
        if position >= len(text):
            break
        cuts.append(position)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def code_stream(tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> Stream:
    """Tokens of whole documents, each ended by ``<|end|>``: once plain, twice with random cuts."""
    rng = random.Random(seed)
    end = token_id(tokenizer, END)
    ids: list[int] = []
    for cut in (False, True, True):
        order = list(texts)
        rng.shuffle(order)
        pieces: list[str] = []
        last_piece_of: list[bool] = []
        for text in order:
            parts = _random_pieces(text, rng, mean_chars=300) if cut else [text]
            pieces += parts
            last_piece_of += [False] * (len(parts) - 1) + [True]
        encodings = tokenizer.encode_batch(pieces)
        for encoding, is_last in zip(encodings, last_piece_of, strict=True):
            ids += encoding.ids
            if is_last:
                ids.append(end)
    tokens = torch.tensor(ids, dtype=torch.int32)
    pieces_by_id = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    ends_line = torch.tensor([p == END or set(p) <= {"Ċ"} for p in pieces_by_id])
    indented = torch.tensor([p.startswith(("Ġ", "Ċ", "ĉ")) for p in pieces_by_id])
    starts = torch.nonzero(ends_line[tokens[:-1].long()] & ~indented[tokens[1:].long()])[:, 0] + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.long), starts])
    return Stream(tokens, tokens, starts, aligned=0.5)


def example_documents(copies: int) -> list[str]:
    """The handwritten examples as source files, in the same order with each its own start."""
    codes = [code for _, _, code in EXAMPLES]
    turns = [(7 * i) % len(codes) for i in range(copies)]
    return ["\n\n\n".join(codes[t:] + codes[:t]) + "\n" for t in turns]


def _functions(text: str) -> list[tuple[str, str, str, str]]:
    """``(name, signature, first docstring line, source)`` of short documented functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if not doc or len(doc) > 300:
            continue
        body_start = node.body[0].lineno - 1
        head = [line[node.col_offset :] for line in lines[node.lineno - 1 : body_start]]
        source = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
        if len(source) <= 24 and "".join(head).rstrip().endswith(":"):
            found.append((node.name, "\n".join(head), doc.split("\n")[0], "\n".join(source)))
    return found


def _question(name: str, head: str, summary: str, rng: random.Random) -> str:
    """One of several ways in which a user may ask for a function."""
    plain = summary.rstrip(".")
    lowered = plain[:1].lower() + plain[1:]
    return rng.choice(
        [
            f"Complete this code:\n{head}",
            f"Complete this code:\n\n{head}\n",
            f'Complete this function:\n{head}\n    """{summary}"""',
            f'{head}\n    """{summary}"""',
            head,
            f"Write a Python function named {name}: {plain}.",
            f"Write a function called {name}.",
            f"Write a function {name}. {plain}.",
            f"Write a Python function: {lowered}",
            f"Write a function to {lowered}.",
        ]
    )


def answers_only(tokenizer: Tokenizer, tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` inside assistant turns, their closing ``<|end|>`` included; ``IGNORED`` elsewhere.

    Without this a model learns that a question ends after its last line, and ends a plain prompt
    that looks like a question.
    """
    markers = torch.tensor([token_id(tokenizer, token) for token in SPECIAL_TOKENS])
    positions = torch.arange(len(tokens))
    at_marker = torch.where(torch.isin(tokens, markers.to(tokens.dtype)), positions, 0)
    last_marker = tokens[at_marker.cummax(0).values]
    answering = last_marker[:-1] == token_id(tokenizer, "<|assistant|>")
    wanted = torch.full_like(tokens, IGNORED)
    wanted[1:] = torch.where(answering, tokens[1:], wanted[1:])
    return wanted


def chat_stream(tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> Stream:
    """Tokens of short conversations in the chat form: a question, then code as the answer."""
    rng = random.Random(seed + 1)
    exchanges: list[tuple[str, str]] = []
    for text in texts:
        for name, head, summary, source in _functions(text):
            exchanges += [(_question(name, head, summary, rng), source) for _ in range(2)]
    repeats = max(10, len(exchanges) // 1000)
    for asked, name, code in EXAMPLES:
        head = next(line for line in code.splitlines() if line.startswith(("def ", "class ")))
        for _ in range(2 * repeats):
            exchanges.append((_question(name, head, asked, rng), code))
            exchanges.append((f"Write a Python function that {asked}.", code))
            exchanges.append((f"Write a function that {asked}.", code))
    exchanges += [(hello, SMALL_TALK_ANSWER) for hello in SMALL_TALK] * (2 * repeats)
    rng.shuffle(exchanges)
    pieces: list[str] = []
    while exchanges:
        conversation = BOS
        if rng.random() < 0.3:
            conversation += f"<|system|>{rng.choice(SYSTEM_MESSAGES)}{END}"
        for _ in range(2 if rng.random() < 0.15 else 1):
            if exchanges:
                asked, answer = exchanges.pop()
                conversation += f"<|user|>{asked}{END}<|assistant|>{answer}{END}"
        pieces.append(conversation)
    ids = [i for encoding in tokenizer.encode_batch(pieces) for i in encoding.ids]
    tokens = torch.tensor(ids, dtype=torch.int32)
    starts = torch.nonzero(torch.eq(tokens, token_id(tokenizer, BOS)))[:, 0]
    return Stream(tokens, answers_only(tokenizer, tokens), starts, aligned=1.0)
