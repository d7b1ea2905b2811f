"""The tree of all errors that this project raises on purpose.

EngineError
├── RequestError        the client's fault: 4xx, names the parameter and what to do
├── CapacityError       retry later: 429 or 503, with `retry_after_s`
├── WorkerError         infrastructure failed under a request: 5xx
│   ├── HandoffError    moving a request's KV failed; nothing was committed
│   ├── NumericsError   a row's logits were not finite; that request alone ends
│   └── PoisonedError   the request ended several workers; it is not retried
└── ConfigError         start-up only: names the file or key and what is supported

Asserts are for our own invariants; everything a user can cause is one of these.
"""


class EngineError(Exception):
    """Root of the tree; `message` may be shown to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(EngineError):
    """The request cannot be served as sent (HTTP 4xx)."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class CapacityError(EngineError):
    """No capacity now (HTTP 429 or 503); the client may retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, status: int = 503) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class WorkerError(EngineError):
    """A worker, a channel or the model failed under the request (HTTP 5xx)."""


class HandoffError(WorkerError):
    """A KV handoff was refused, timed out or corrupted; the receiver committed nothing."""


class NumericsError(WorkerError):
    """The model produced NaN or infinity for this request, whose blocks are never cached then, or
    the constraint on its output allows no token any more.
    """


class PoisonedError(WorkerError):
    """Several workers died while running this request, so it is not retried."""


class ConfigError(EngineError):
    """Start-up cannot continue; the message names the file or key and the supported values."""
