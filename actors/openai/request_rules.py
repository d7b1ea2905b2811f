"""Ranges, limits and meaning of request fields, each refused in OpenAI's words and codes.

Pure checks of one value at a time; actors/openai/protocol.py puts them together.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actors.openai.request_bodies import Scalar
from engine.errors import RequestError
from engine.text.chat_template import is_reserved_kwarg

MAX_JSON_DEPTH = 64
MAX_STOP_TOKEN_IDS = 128
MAX_SALT_CHARS = 1024
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARG_CHARS = 1024
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_SHOWN_KEYS = 8  # of an object, in an error's message
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
JSON_MEDIA_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Values a number may have; `low_is_open` leaves `low` itself out."""

    low: float
    high: float
    low_is_open: bool = False

    def check(self, param: str, value: float | None) -> None:
        """Raises RequestError naming the bound that `value` breaks."""
        if value is None:
            return
        kind = "integer" if isinstance(value, int) else "decimal"
        if value < self.low or (self.low_is_open and value == self.low):
            sign = ">" if self.low_is_open else ">="
            raise RequestError(
                f"Invalid '{param}': {kind} below minimum value. Expected a value {sign}"
                f" {self.low}, but got {value} instead.",
                param=param,
                code=f"{kind}_below_min_value",
            )
        if value > self.high:
            raise RequestError(
                f"Invalid '{param}': {kind} above maximum value. Expected a value <= {self.high},"
                f" but got {_shown(value)} instead.",
                param=param,
                code=f"{kind}_above_max_value",
            )


TTFT_DEADLINE_HEADER = "x-ttft-deadline-ms"
_TTFT_DEADLINE_MS = Bounds(0, 24 * 3600 * 1000, low_is_open=True)


def read_ttft_deadline_s(value: str | None) -> float | None:
    """Seconds from arrival in which the client wants its first token; None = it did not say.

    A wish that decides who goes first, no timeout. Raises RequestError unless the header is a
    number of milliseconds.
    """
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if math.isnan(milliseconds):
        raise RequestError(
            f"Invalid '{TTFT_DEADLINE_HEADER}': expected a number of milliseconds, but got"
            f" {value[:40]!r} instead.",
            param=TTFT_DEADLINE_HEADER,
            code="invalid_value",
        )
    _TTFT_DEADLINE_MS.check(TTFT_DEADLINE_HEADER, milliseconds)
    return 1e-3 * milliseconds


# Fields both endpoints share whose bounds depend on nothing else.
BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1, low_is_open=True),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "seed": Bounds(INT64_MIN, INT64_MAX),
    "top_k": Bounds(-1, INT64_MAX),
    "min_p": Bounds(0, 1),
    "repetition_penalty": Bounds(0.01, 2),  # logits are divided by it, in float32
    "min_tokens": Bounds(0, INT64_MAX),
    "max_tokens": Bounds(0, INT64_MAX),
    "max_completion_tokens": Bounds(1, INT64_MAX),
    "priority": Bounds(-(2**31), 2**31 - 1),
}


@contextmanager
def refused_as(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field in a refusal of the block, which reads another protocol's body as a chat.

    names: field of the chat -> field of the body. What stood behind the chat's name is left out:
    the chat has other numbers of messages, and other fields in them.
    """
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        name = names.get(re.split(r"[.\[]", param)[0])
        if name is None:
            raise
        message = error.message.replace(f"'{param}'", f"'{name}'")
        raise RequestError(message, param=name, code=error.code, status=error.status) from error


def invalid(param: str, detail: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"Invalid '{param}': {detail}", param=param, code=code)


def missing(param: str) -> RequestError:
    return RequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def unknown_kind(param: str, value: str, supported: Sequence[str]) -> RequestError:
    """For a word that is none of those which are understood."""
    words = ", ".join(f"'{word}'" for word in supported)
    return RequestError(
        f"Invalid value: '{value[:40]}'. Supported values are: {words}.",
        param=param,
        code="invalid_value",
    )


def check_content_type(value: str | None) -> None:
    """Refuses a body that says it is something else than JSON; one that says nothing is read."""
    media_type = (value or JSON_MEDIA_TYPE).split(";")[0].strip().lower()
    if media_type != JSON_MEDIA_TYPE:
        raise RequestError(
            f"Unsupported content type '{media_type[:80]}': send the header 'Content-Type:"
            f" {JSON_MEDIA_TYPE}'.",
            code="unsupported_content_type",
        )


def check_content_encoding(value: str | None) -> None:
    """Refuses a compressed body: nothing here would unpack it."""
    encoding = (value or "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            f"Unsupported content encoding '{encoding[:80]}': send the body as it is, without the"
            " header 'Content-Encoding'.",
            code="unsupported_content_encoding",
            status=415,
        )


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """OpenAI's bounds of a field without effect here."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise invalid(
            "metadata",
            f"too many properties. Expected an object with at most {MAX_METADATA} properties, but"
            f" got an object with {len(metadata)} properties instead.",
            "object_above_max_properties",
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise invalid("metadata", f"a key is longer than {MAX_METADATA_KEY_CHARS} characters.")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            where = f"metadata.{key}"
            raise invalid(
                where,
                f"string too long. Expected at most {MAX_METADATA_VALUE_CHARS} characters.",
                "string_above_max_length",
            )


def check_length(param: str, num_items: int, max_items: int) -> None:
    """An array that must hold between 1 and `max_items` elements."""
    if num_items == 0:
        raise invalid(
            param,
            "empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "empty_array",
        )
    if num_items > max_items:
        raise too_many(param, num_items, max_items)


def too_many(param: str, num_items: int, max_items: int) -> RequestError:
    """For an array that is longer than allowed."""
    return invalid(
        param,
        f"array too long. Expected an array with maximum length {max_items}, but got an array"
        f" with length {num_items} instead.",
        "array_above_max_length",
    )


def check_chars(param: str, text: str, max_chars: int) -> None:
    """A string that must hold between 1 and `max_chars` characters."""
    if not text:
        raise invalid(param, "empty string.", "empty_string")
    if len(text) > max_chars:
        raise invalid(
            param,
            f"string too long. Expected a string with maximum length {max_chars}, but got a"
            f" string with length {len(text)} instead.",
            "string_above_max_length",
        )


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary. Raises RequestError."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(f"{param}[{position}]", _out_of_vocabulary(_shown(token_id), vocab_size))


def read_stops(stop: str | list[str] | None, *, max_stops: int, max_chars: int) -> tuple[str, ...]:
    if stop is None or stop == []:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    check_length("stop", len(stops), max_stops)
    for position, text in enumerate(stops):
        check_chars("stop" if isinstance(stop, str) else f"stop[{position}]", text, max_chars)
    return tuple(dict.fromkeys(stops))


def read_logit_bias(
    bias: Mapping[str, float] | None, *, max_entries: int, vocab_size: int
) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > max_entries:
        raise invalid(
            "logit_bias",
            f"too many entries. Expected at most {max_entries}, but got {len(bias)} instead.",
            "object_above_max_properties",
        )
    unknown = [key for key in bias if not _is_token_id(key, vocab_size)]
    if unknown:
        keys = ", ".join(f"'{key[:20]}'" for key in unknown[:MAX_SHOWN_KEYS])
        more = f" and {len(unknown) - MAX_SHOWN_KEYS} more" * (len(unknown) > MAX_SHOWN_KEYS)
        raise invalid("logit_bias", _out_of_vocabulary(f"key {keys}{more}", vocab_size))
    for key, value in bias.items():
        Bounds(-100, 100).check(f"logit_bias.{key}", value)
    return {int(key): value for key, value in bias.items()}


def _is_token_id(key: str, vocab_size: int) -> bool:
    """Whether a key of a JSON object is a token id."""
    # More than ten digits are beyond every vocabulary, and int() of a long string is slow.
    is_number = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
    return is_number and int(key) < vocab_size


def _out_of_vocabulary(what: str, vocab_size: int) -> str:
    return (
        f"{what} is out of vocabulary. Expected one of {vocab_size} token ids, 0 to"
        f" {vocab_size - 1}."
    )


def read_cache_identity(salt: str | None, extra_key: str | None) -> str:
    """Joins both into one string, unique for each pair; "" when neither is given."""
    for param, text in (("cache_salt", salt), ("extra_key", extra_key)):
        if text is not None:
            check_chars(param, text, MAX_SALT_CHARS)
    salt = salt or ""
    if extra_key is None and not salt.startswith("\0"):
        return salt
    return f"\0{len(salt)}:{salt}{extra_key or ''}"


def read_template_kwargs(kwargs: Mapping[str, Scalar] | None) -> dict[str, object]:
    """Variables for the chat template: few, short, and none the renderer itself sets."""
    if not kwargs:
        return {}
    param = "chat_template_kwargs"
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise invalid(param, f"at most {MAX_TEMPLATE_KWARGS} are allowed.")
    for name, value in kwargs.items():
        if not name.isidentifier() or len(name) > MAX_TEMPLATE_KWARG_CHARS:
            raise invalid(param, f"'{name[:40]}' is not a variable's name.")
        if is_reserved_kwarg(name):
            raise invalid(param, f"'{name[:40]}' is reserved.")
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_KWARG_CHARS:
            raise invalid(
                param, f"'{name[:40]}' is longer than {MAX_TEMPLATE_KWARG_CHARS} characters."
            )
        if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
            raise invalid(param, f"'{name[:40]}' is beyond 64 bits.")
    return dict(kwargs)


def check_plain(value: object, param: str) -> None:
    """Free-form JSON: bounded depth, and integers that fit the wire's 64 bits."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, list):
                inner += item
            elif isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, int) and not INT64_MIN <= item <= INT64_MAX:
                raise invalid(param, "an integer is beyond 64 bits.")
        if not inner:
            return
        level = inner
    raise invalid(param, f"nested deeper than {MAX_JSON_DEPTH} levels.")


def _shown(value: float) -> str:
    """A number as text, cut: a client may send thousands of digits."""
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        return "an integer beyond 64 bits"
    return str(value)
