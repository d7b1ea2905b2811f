"""Errors in Anthropic's shape: the same statuses and words as OpenAI's, in another object."""

from dataclasses import replace

import msgspec

from actors.openai.response_objects import ErrorReply, error_detail, error_reply

PATH = "/v1/messages"  # this and what is below it answers in this shape
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's code, which its clients look for
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def reply_at(path: str, error: Exception) -> ErrorReply:
    """The error as the protocol of `path` writes it; the path is the one within the application."""
    reply = error_reply(error)
    if path != PATH and not path.startswith(f"{PATH}/"):
        return reply
    return replace(reply, body=error_body(error))


def error_body(error: Exception) -> bytes:
    """The error as JSON; its status is that of `error_reply`."""
    status = error_reply(error).status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    said = error_detail(error)
    detail: dict[str, object] = {"type": kind, "message": said.message}
    if said.code == THREAD_UNSUPPORTED:
        detail["details"] = {"error_code": said.code}
    return msgspec.json.encode({"type": "error", "error": detail})
