r"""Log-probabilities of output and prompt tokens, in the shapes of the two endpoints.

Chat names a token by its text and gives its bytes beside it. The older completions object has text
only, so there a token that is not whole characters is written `bytes:\xe4\xbd`, as OpenAI did: two
torn tokens must not fall together in one mapping. Of prompts there are vLLM's field and OpenAI's
echo; of a prompt's first token nothing is known: null.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.openai.response_objects import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TokenLogprob,
    TopLogprob,
)
from engine.request import PromptScores
from engine.text.output_text import OutputToken
from engine.text.tokenizing import Tokenizing

MIN_LOGPROB = -9999.0  # JSON has no -infinity; OpenAI writes this for "practically never"


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What log-probabilities call a token: its text, or vLLM's `token_id:7`."""

    tokenizing: Tokenizing
    by_id: bool = False

    def in_chat(self, token_id: int) -> str:
        if self.by_id:
            return f"token_id:{token_id}"
        return self.tokenizing.piece(token_id).decode("utf-8", "replace")

    def in_completion(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_id else token_name(token_id, self.tokenizing)


def chat_logprobs(
    tokens: Sequence[OutputToken], token_names: TokenNames, *, lists_chosen: bool = False
) -> ChatLogprobs:
    """`choices[].logprobs` of a chat; every token was sampled with logprobs on.

    lists_chosen: the chosen token is among its top ones even if they do not have it, as in vLLM
    where the client named them.
    """
    return ChatLogprobs(content=[_chat_token(token, token_names, lists_chosen) for token in tokens])


def completion_logprobs(
    tokens: Sequence[OutputToken], token_names: TokenNames, num_echoed_chars: int = 0
) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; the chosen token is the first of its top ones.

    `num_echoed_chars`: of the prompt, where the choice's text begins with it.
    """
    names: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        logprobs = token.logprobs
        assert logprobs is not None, f"token {token.token_id} was sampled without logprobs"
        names.append(token_names.in_completion(token.token_id))
        own = finite(logprobs.chosen)
        chosen.append(own)
        top = {
            token_names.in_completion(token_id): finite(value)
            for token_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        }
        tops.append({names[-1]: own} | top)
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=chosen,
        top_logprobs=tops,
        text_offset=[num_echoed_chars + token.text_offset for token in tokens],
    )


def _chat_token(token: OutputToken, token_names: TokenNames, lists_chosen: bool) -> TokenLogprob:
    logprobs = token.logprobs
    assert logprobs is not None, f"token {token.token_id} was sampled without logprobs"
    top = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
    if lists_chosen and token.token_id not in logprobs.top_ids:
        top.insert(0, (token.token_id, logprobs.chosen))
    return TokenLogprob(
        token=token_names.in_chat(token.token_id),
        logprob=finite(logprobs.chosen),
        bytes=list(token_names.tokenizing.piece(token.token_id)),
        top_logprobs=[_top(token_id, value, token_names) for token_id, value in top],
    )


def _top(token_id: int, logprob: float, token_names: TokenNames) -> TopLogprob:
    piece = token_names.tokenizing.piece(token_id)
    return TopLogprob(
        token=token_names.in_chat(token_id), logprob=finite(logprob), bytes=list(piece)
    )


def token_name(token_id: int, tokenizing: Tokenizing) -> str:
    """A token as text that no other token of other bytes shares."""
    piece = tokenizing.piece(token_id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in piece)


def finite(logprob: float) -> float:
    """Returns a finite number in place of minus infinity, which JSON cannot hold."""
    return max(logprob, MIN_LOGPROB)


Best = list[tuple[int, float]]  # (token id, log-probability), best first


def prompt_logprobs(
    prompt_ids: Sequence[int], scores: PromptScores | None, num_best: int, tokenizing: Tokenizing
) -> PromptLogprobList:
    """`prompt_logprobs` of a response: per token its own entry, then those of the best."""
    found: PromptLogprobList = [None]
    for token_id, (chosen, rank, best) in zip(
        prompt_ids[1:], _tokens(scores, num_best), strict=True
    ):
        entries = {str(token_id): _entry(token_id, chosen, rank, tokenizing)}
        for place, (best_id, value) in enumerate(best, start=1):
            entries.setdefault(str(best_id), _entry(best_id, value, place, tokenizing))
        found.append(entries)
    return found


def echoed_logprobs(
    text: str,
    prompt_ids: Sequence[int],
    scores: PromptScores | None,
    num_best: int,
    token_names: TokenNames,
) -> CompletionLogprobs:
    """The prompt's part of `choices[].logprobs`; `text` is the prompt as it is echoed."""
    names = [token_names.in_completion(token_id) for token_id in prompt_ids]
    values: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for name, (chosen, _, best) in zip(names[1:], _tokens(scores, num_best), strict=True):
        values.append(finite(chosen))
        top = {token_names.in_completion(best_id): finite(value) for best_id, value in best}
        tops.append({name: finite(chosen)} | top)
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=values,
        top_logprobs=tops,
        text_offset=text_offsets(text, prompt_ids, token_names.tokenizing),
    )


def joined(prompt: CompletionLogprobs, output: CompletionLogprobs) -> CompletionLogprobs:
    """Joins two records; the output's offsets already count the prompt's text."""
    return CompletionLogprobs(
        tokens=prompt.tokens + output.tokens,
        token_logprobs=prompt.token_logprobs + output.token_logprobs,
        top_logprobs=prompt.top_logprobs + output.top_logprobs,
        text_offset=prompt.text_offset + output.text_offset,
    )


def text_offsets(text: str, prompt_ids: Sequence[int], tokenizing: Tokenizing) -> list[int]:
    """[T] where in `text` each token begins; one that is not in it has no width.

    `text` is what the tokens say, or less: without the special tokens put around it.
    """
    detokenizer = tokenizing.detokenizer(skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in prompt_ids]
    start = max(0, "".join([*pieces, detokenizer.flush()]).find(text))
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(min(max(end - start, 0), len(text)))
        end += len(piece)
    return offsets


def _tokens(scores: PromptScores | None, num_best: int) -> Iterator[tuple[float, int, Best]]:
    """Yields log-probability, rank and best alternatives of every prompt token but the first."""
    for piece in () if scores is None else scores.pieces:
        columns = (piece.chosen, piece.ranks, piece.top_ids, piece.top_logprobs)
        for chosen, rank, ids, values in zip(*columns, strict=True):
            best = zip(ids[:num_best], values[:num_best], strict=True)
            yield chosen, rank, list(best)


def _entry(token_id: int, logprob: float, rank: int, tokenizing: Tokenizing) -> PromptLogprob:
    text = tokenizing.piece(token_id).decode("utf-8", "replace")
    return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text)
