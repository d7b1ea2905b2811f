"""What became known of a prompt, on its way to whoever writes the response.

It comes with its choice's first delta, which is the only one where no output was asked for.
"""

from dataclasses import dataclass

from engine.messages import TokenRecord
from engine.output_text import OutputText, TextDelta
from engine.request import FinishReason, PromptScores


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta(TextDelta):
    """A delta that tells of the prompt, too."""

    prompt: PromptScores


def read_record(record: TokenRecord, output: OutputText) -> TextDelta:
    """The next delta of the choice whose text is `output`; no text is made of a prompt's token."""
    delta = output.push(record) if record.is_output else _end_of_prompt(record)
    if record.prompt is None:
        return delta
    return PromptDelta(
        text=delta.text,
        tokens=delta.tokens,
        finish=delta.finish,
        stop_reason=delta.stop_reason,
        num_cached_tokens=delta.num_cached_tokens,
        prompt=record.prompt,
    )


def _end_of_prompt(record: TokenRecord) -> TextDelta:
    assert record.finish is not None, f"{record.key} asked for no token and goes on"
    finish = FinishReason(record.finish)
    return TextDelta(text="", finish=finish, num_cached_tokens=record.num_cached_tokens)
