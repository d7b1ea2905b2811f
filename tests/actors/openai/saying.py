"""An answer written as if a model had said a given text."""

from typing import Literal

from actors.anthropic.writer import MessagesWriter
from actors.openai.answer_shapes import MessagesShape
from actors.openai.protocol import ParsedRequest
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import ResponseWriter, build_output_text, build_writer
from engine.messages import TokenRecord
from engine.plan import TokenLogprobs
from engine.request import RequestKey
from engine.text.tokenizing import Tokenizing

IDENTITY = ResponseIdentity(request_id="ab" * 16, created_s=1_700_000_000, model="tiny")


def say(
    parsed: ParsedRequest, tokenizing: Tokenizing, text: str, *, finish: Literal["stop", "length"]
) -> list[bytes]:
    """The bytes of the answer. Two of three prompt tokens were cached; `stop` ends it by eos."""
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    if finish == "stop" or not ids:
        ids = [*ids, min(tokenizing.token_bytes.special_ids)]
    writer: ResponseWriter
    if isinstance(parsed.shape, MessagesShape):
        writer = MessagesWriter(parsed, IDENTITY, tokenizing)
    else:
        writer = build_writer(parsed, IDENTITY, tokenizing)
    sent = writer.start([[1, 2, 3]])
    output = build_output_text(parsed, tokenizing)
    for index, token_id in enumerate(ids):
        record = TokenRecord(
            key=RequestKey(request_id="ab" * 16, child=0),
            index=index,
            token_id=token_id,
            logprobs=None if parsed.sampling.logprobs is None else TokenLogprobs(-0.5, [], []),
            num_cached_tokens=2 if index == 0 else None,
            finish=finish if index == len(ids) - 1 else None,
        )
        delta = output.push(record)
        sent += writer.delta(0, delta)
        if delta.finish is not None:  # by a stop string
            break
    return sent + writer.finish()
