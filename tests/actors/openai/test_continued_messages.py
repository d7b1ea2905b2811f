"""An answer that goes on in an assistant's message: its text begins where that one ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from actors.openai.protocol import ParsedRequest, parse_chat
from actors.openai.response_writers import build_output_text
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.messages import TokenRecord
from engine.request import RequestKey
from engine.text.tokenizing import load_tokenizer
from tests.actors.openai.dialects import DIALECT
from tests.harness.tokenizer_folders import byte_level_folder, llama_like_folder, metaspace_folder

MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
KEY = RequestKey(request_id="0" * 32)


def parsed_chat(*, continues: bool) -> ParsedRequest:
    messages = [{"role": "user", "content": "?"}]
    fields: dict[str, Any] = {"model": "tiny", "messages": messages}
    if continues:
        messages.append({"role": "assistant", "content": "The"})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return parse_chat(json.dumps(fields).encode(), EdgeConfig(), MODEL, lambda: 1)


@pytest.mark.parametrize("make_folder", [byte_level_folder, llama_like_folder, metaspace_folder])
@pytest.mark.parametrize("continues", [True, False])
def test_only_an_answer_of_its_own_loses_the_space_that_a_decoder_puts_first(
    tmp_path: Path, make_folder: Callable[[Path], Path], continues: bool
) -> None:
    """Wherever the message is cut: before each of its tokens."""
    folder = make_folder(tmp_path)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizing = load_tokenizer(folder)
    words = sorted(i for token, i in library.get_vocab().items() if token[:1] in "▁Ġ")[:9]
    ids = [*library.encode("The", add_special_tokens=False).ids, *words]
    parsed = parsed_chat(continues=continues)
    num_spaces = 0
    for cut in range(1, len(ids)):
        output = build_output_text(parsed, tokenizing)
        records = [
            TokenRecord(key=KEY, index=i, token_id=token_id) for i, token_id in enumerate(ids[cut:])
        ]
        text = "".join(output.push(record).text for record in records)
        begun, whole = library.decode(ids[:cut]), library.decode(ids)
        assert text == (whole.removeprefix(begun) if continues else library.decode(ids[cut:]))
        num_spaces += text.startswith(" ")
    assert num_spaces > 0 or not continues
