"""Where a request goes: a pure decision over snapshots, replayable, without Ray.

For now the least queued tokens win. The contract (a decision with a reason, `now_s` as an
argument, snapshots plus what was placed since each report) is what length-aware placement uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import Assign, Hold, Placement, PlaceRequest, Reject, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What the allocator knows of one worker when it decides."""

    name: str
    role: Role
    is_alive: bool
    queued_tokens: int  # reported, plus what was placed there since that report
    num_running: int  # likewise
    num_free_blocks: int
    num_blocks: int


RETRY_AFTER_S = 1.0


def place(
    prompt: PlaceRequest,
    snapshots: Sequence[WorkerSnapshot],
    now_s: float,
) -> Placement:
    """Choose a prefill and a decode worker for a prompt.

    Returns Hold while a role has no live worker (they restart by themselves), Reject when the
    queued tokens would exceed the limit. Ties go to the first by name, so equal inputs decide
    equally. `now_s` is unused by this policy and part of the contract.
    """
    del now_s
    alive = sorted((s for s in snapshots if s.is_alive), key=lambda s: s.name)
    prefillers = [s for s in alive if s.role != "decode"]
    if not prefillers:
        return Hold(reason="no prefill worker is alive", retry_after_s=RETRY_AFTER_S)
    queued_tokens = sum(s.queued_tokens for s in prefillers)
    limit = prompt.max_queued_tokens
    if limit is not None and 0 < queued_tokens > limit - prompt.num_prompt_tokens:
        reason = f"{queued_tokens} tokens are queued; the limit is {limit}"
        return Reject(reason=reason, retry_after_s=RETRY_AFTER_S)
    prefill = min(_prefer(prefillers, prompt.avoid), key=lambda s: s.queued_tokens)
    if prefill.role == "unified":
        return Assign(prefill_worker=prefill.name, decode_worker=None)
    decoders = [s for s in alive if s.role == "decode"]
    if not decoders:
        return Hold(reason="no decode worker is alive", retry_after_s=RETRY_AFTER_S)
    decode = min(
        _prefer(decoders, prompt.avoid),
        key=lambda s: s.num_running - s.num_free_blocks / max(s.num_blocks, 1),
    )
    return Assign(prefill_worker=prefill.name, decode_worker=decode.name)


def _prefer(workers: list[WorkerSnapshot], avoid: Sequence[str]) -> list[WorkerSnapshot]:
    """Those not in `avoid`; all of them when nothing else is left."""
    return [s for s in workers if s.name not in avoid] or workers
