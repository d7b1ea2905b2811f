"""/tokenize and /detokenize in vLLM's shapes: reads requests and writes answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.openai.logprob_objects import token_name
from actors.openai.prompts import check_prompt_chars, read_chat_prompt
from actors.openai.request_bodies import (
    ChatBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
    decode_body,
)
from actors.openai.request_rules import check_token_ids, invalid, missing, too_many
from actors.openai.response_objects import DetokenizeAnswer, TokenizeAnswer
from actors.openai.served_model import ServedModel, check_model
from actors.openai.tool_rules import check_model_knows_tools, read_tools
from engine.messages import TokenizeRequest
from engine.text.tokenizing import Tokenizing

CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """A validated /tokenize request."""

    prompt: TokenizeRequest
    wants_texts: bool  # of each token beside its id


def parse_tokenize(body: bytes, model: ServedModel) -> TokenizeCall:
    """Raises RequestError with `param` and OpenAI's code."""
    asked = decode_body(body, TokenizeBody)
    check_model(asked.model, model)
    if asked.messages is not None:
        prompt = _read_chat(asked, asked.messages, model)
    elif asked.prompt is not None:
        prompt = _read_text(asked, asked.prompt, model)
    else:
        raise missing("prompt")
    return TokenizeCall(prompt=prompt, wants_texts=bool(asked.return_token_strs))


def tokenize_answer(
    call: TokenizeCall, token_ids: list[int], model: ServedModel, tokenizing: Tokenizing
) -> TokenizeAnswer:
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=model.max_model_len,
        tokens=token_ids,
        token_strs=[token_name(i, tokenizing) for i in token_ids] if call.wants_texts else None,
    )


def parse_detokenize(body: bytes, model: ServedModel) -> list[int]:
    """Token ids, at most a context's worth; raises RequestError."""
    asked = decode_body(body, DetokenizeBody)
    check_model(asked.model, model)
    if len(asked.tokens) > model.max_model_len:
        raise too_many("tokens", len(asked.tokens), model.max_model_len)
    check_token_ids("tokens", asked.tokens, model.vocab_size)
    return asked.tokens


def detokenize_answer(token_ids: Sequence[int], tokenizing: Tokenizing) -> DetokenizeAnswer:
    """The text of all tokens, special ones by name."""
    return DetokenizeAnswer(prompt=tokenizing.decode(token_ids, skip_special_tokens=False))


def _read_text(asked: TokenizeBody, text: str, model: ServedModel) -> TokenizeRequest:
    for name in CHAT_ONLY:
        if getattr(asked, name) is not None:
            raise invalid(name, "only allowed with 'messages'.")
    check_prompt_chars("prompt", len(text), model)
    return TokenizeRequest(text=text, add_special_tokens=asked.add_special_tokens is not False)


def _read_chat(asked: TokenizeBody, messages: list[Message], model: ServedModel) -> TokenizeRequest:
    if asked.prompt is not None:
        raise invalid("prompt", "cannot be combined with 'messages'.")
    if asked.tools is not None:
        check_model_knows_tools(model, "tools")
    chat = ChatBody(
        model=model.name,
        messages=messages,
        tools=asked.tools,
        add_special_tokens=asked.add_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return read_chat_prompt(chat, model, None if asked.tools is None else read_tools(asked.tools))
