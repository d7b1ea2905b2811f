"""Chooses the kind of the next channel to a peer: an ordered list without resting or unfit kinds.

Knows no channels; its caller reports failures.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import ConfigError
from engine.messages import ChannelKind

MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0
MAX_REST_S = 16 * FAILURE_WINDOW_S

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


@dataclass(slots=True, kw_only=True, eq=False)
class _Failures:
    """Of one kind."""

    at_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    rest_s: float = 0.0  # how long the last rest was
    rests_until_s: float = -math.inf

    def add(self, now_s: float) -> None:
        """MAX_FAILURES in a window begin a rest; one that follows soon on a rest, a longer one."""
        self.at_s.append(now_s)
        if self.rests_until_s <= now_s < self.rests_until_s + FAILURE_WINDOW_S:
            self.rest_s = min(2 * self.rest_s, MAX_REST_S)
        elif len(self.at_s) == MAX_FAILURES and self.at_s[0] > now_s - FAILURE_WINDOW_S:
            self.rest_s = FAILURE_WINDOW_S
        else:
            return
        self.rests_until_s = now_s + self.rest_s


class ChannelChoice:
    """The kinds of channel that may be opened to one peer now."""

    def __init__(self, order: tuple[ChannelKind, ...], clock: Clock) -> None:
        assert order, "no kind of channel to choose from"
        self._order = order
        self._clock = clock
        self._failures = {kind: _Failures() for kind in order}
        self._unfit: set[ChannelKind] = set()

    @property
    def favourite(self) -> ChannelKind:
        return self._order[0]

    def candidates(self) -> list[ChannelKind]:
        """The kinds to try, best first; never empty, because the last of the order is always there.

        A kind that failed MAX_FAILURES times in FAILURE_WINDOW_S rests for as long, and twice as
        long, up to MAX_REST_S, if it fails again soon after: while a channel opens, or does not
        until its deadline, every handoff to the peer waits.
        """
        now_s, last = self._clock.now_s(), self._order[-1]
        return [kind for kind in self._order if kind == last or self._is_usable(kind, now_s)]

    def count_failure(self, kind: ChannelKind) -> None:
        """Counts a channel that did not open, or that broke."""
        self._failures[kind].add(self._clock.now_s())

    def count_unfit(self, kind: ChannelKind) -> None:
        """Notes that a kind does not work with this peer, until `forget_unfit`."""
        self._unfit.add(kind)

    def forget_unfit(self) -> None:
        """Allows all kinds again: the peer may be another process now, or on another host."""
        self._unfit.clear()

    def _is_usable(self, kind: ChannelKind, now_s: float) -> bool:
        return kind not in self._unfit and now_s >= self._failures[kind].rests_until_s
