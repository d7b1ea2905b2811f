"""Log-probabilities of output tokens in the shapes of the two endpoints.

Chat names a token by its text and gives its bytes beside it. The older completions object has text
only, so there a token that is not whole characters is written `bytes:\\xe4\\xbd`, as OpenAI did:
two torn tokens must not fall together in one mapping.
"""

from collections.abc import Sequence

from actors.api.openai_objects import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from engine.output_text import OutputToken
from engine.tokenizing import Tokenizing

MIN_LOGPROB = -9999.0  # JSON has no -infinity; OpenAI writes this for "practically never"


def chat_logprobs(tokens: Sequence[OutputToken], tokenizing: Tokenizing) -> ChatLogprobs:
    """`choices[].logprobs` of a chat; every token was sampled with logprobs on."""
    return ChatLogprobs(content=[_chat_token(token, tokenizing) for token in tokens])


def completion_logprobs(
    tokens: Sequence[OutputToken], tokenizing: Tokenizing, num_echoed_chars: int = 0
) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; the chosen token is always among its top ones.

    `num_echoed_chars`: of the prompt, where the choice's text begins with it.
    """
    names: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        logprobs = token.logprobs
        assert logprobs is not None, f"token {token.token_id} was sampled without logprobs"
        names.append(token_name(token.token_id, tokenizing))
        own = finite(logprobs.chosen)
        chosen.append(own)
        top = {
            token_name(token_id, tokenizing): finite(value)
            for token_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        }
        tops.append(top | {names[-1]: own})
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=chosen,
        top_logprobs=tops,
        text_offset=[num_echoed_chars + token.text_offset for token in tokens],
    )


def _chat_token(token: OutputToken, tokenizing: Tokenizing) -> TokenLogprob:
    logprobs = token.logprobs
    assert logprobs is not None, f"token {token.token_id} was sampled without logprobs"
    piece = tokenizing.piece(token.token_id)
    return TokenLogprob(
        token=_chat_name(piece),
        logprob=finite(logprobs.chosen),
        bytes=list(piece),
        top_logprobs=[
            _top(token_id, value, tokenizing)
            for token_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ],
    )


def _top(token_id: int, logprob: float, tokenizing: Tokenizing) -> TopLogprob:
    piece = tokenizing.piece(token_id)
    return TopLogprob(token=_chat_name(piece), logprob=finite(logprob), bytes=list(piece))


def _chat_name(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def token_name(token_id: int, tokenizing: Tokenizing) -> str:
    """A token as text that no other token of other bytes shares."""
    piece = tokenizing.piece(token_id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in piece)


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return max(logprob, MIN_LOGPROB)
