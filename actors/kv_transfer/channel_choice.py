"""Chooses the kind of the next channel to a peer: an ordered list without resting or unfit kinds.

Knows no channels; its caller reports failures.
"""

from collections import deque

from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import ConfigError
from engine.messages import ChannelKind

MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0

LAST_RESORT: ChannelKind = "object_store"
BEST_FIRST: tuple[ChannelKind, ...] = ("cuda_ipc", "nccl_pair", "gloo_pair", LAST_RESORT)
BETWEEN_GPUS: tuple[ChannelKind, ...] = ("cuda_ipc", "nccl_pair")


def channel_order(config: HandoffConfig, *, is_on_gpu: bool) -> tuple[ChannelKind, ...]:
    """The kinds to try, best first, for a worker whose KV store is on a GPU or not.

    Raises ConfigError when the configured kind needs a GPU.
    """
    if config.channel == "auto":
        return BEST_FIRST if is_on_gpu else BEST_FIRST[len(BETWEEN_GPUS) :]
    if config.channel in BETWEEN_GPUS and not is_on_gpu:
        raise ConfigError(
            f"handoff.channel is {config.channel}, and model.device is not cuda: use auto,"
            " gloo_pair or object_store"
        )
    return (config.channel, LAST_RESORT) if config.channel != LAST_RESORT else (LAST_RESORT,)


def piece_bytes_of(config: HandoffConfig, kind: ChannelKind) -> int:
    """The largest piece that such a channel is given."""
    match kind:
        case "cuda_ipc":
            return config.pulled_piece_bytes
        case "nccl_pair":
            return config.device_piece_bytes
        case "gloo_pair" | "object_store":
            return config.piece_bytes


class ChannelChoice:
    """The kinds of channel that may be opened to one peer now."""

    def __init__(self, order: tuple[ChannelKind, ...], clock: Clock) -> None:
        assert order, "no kind of channel to choose from"
        self._order = order
        self._clock = clock
        self._failed_at_s: dict[ChannelKind, deque[float]] = {
            kind: deque(maxlen=MAX_FAILURES) for kind in order
        }
        self._unfit: set[ChannelKind] = set()

    @property
    def favourite(self) -> ChannelKind:
        return self._order[0]

    def candidates(self) -> list[ChannelKind]:
        """The kinds to try, best first; never empty, because the last of the order is always there.

        A kind rests until FAILURE_WINDOW_S have passed since MAX_FAILURES failures.
        """
        since_s = self._clock.now_s() - FAILURE_WINDOW_S
        last = self._order[-1]
        return [kind for kind in self._order if kind == last or self._is_usable(kind, since_s)]

    def count_failure(self, kind: ChannelKind) -> None:
        """Counts a channel that did not open, or that broke."""
        self._failed_at_s[kind].append(self._clock.now_s())

    def count_unfit(self, kind: ChannelKind) -> None:
        """Notes that a kind does not work with this peer, until `forget_unfit`."""
        self._unfit.add(kind)

    def forget_unfit(self) -> None:
        """Allows all kinds again: the peer may be another process now, or on another host."""
        self._unfit.clear()

    def _is_usable(self, kind: ChannelKind, since_s: float) -> bool:
        num_failures = sum(at_s > since_s for at_s in self._failed_at_s[kind])
        return kind not in self._unfit and num_failures < MAX_FAILURES
