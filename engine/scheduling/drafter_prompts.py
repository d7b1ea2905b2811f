"""Says of which prompts a draft model computes K and V, too, on a worker that hands them over.

Its K and V of a token follow from those of all tokens before. So they are computed of a request as
far as they are without a gap: from its first token on, or behind a cached prefix in whose blocks
they are. A cached block without them stays so, because others may be reading it: what is missing
then, the decode worker computes. Requests that get no drafts there are left out, and so are their
blocks in the cache. Knows no rows and no tensors.
"""

from collections.abc import Sequence

from engine.request import Request
from engine.speculation.drafter import DraftPolicy, most_drafts_ever

_MIN_TOKENS_LEFT = 3  # one from the prefill worker, and a step of the decode worker with a draft


class DrafterPrompts:
    """The blocks of one cache that hold a draft model's K and V, too; engine thread only."""

    def __init__(
        self, policy: DraftPolicy, *, num_blocks: int, block_size: int, max_model_len: int
    ) -> None:
        """policy: as of the decode workers. max_model_len: of the draft model."""
        self._policy = policy
        self._block_size = block_size
        self._max_model_len = max_model_len
        # [num_blocks]  whether the block holds them of all its tokens, or will once steps in flight
        # have ended
        self._is_complete = bytearray(num_blocks)

    def plan(self, chunks: Sequence[tuple[Request, int]]) -> list[int]:
        """Indices of the chunks that the draft model computes, too; counts them as computed.

        chunks: request, number of tokens; its computed tokens do not include them yet.
        """
        return [i for i, (request, num) in enumerate(chunks) if self._take(request, num)]

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """These blocks get another content."""
        for block_id in block_ids:
            self._is_complete[block_id] = False

    def _take(self, request: Request, num_tokens: int) -> bool:
        if not self._may_draft(request):
            return False
        size, first = self._block_size, request.num_computed_tokens
        if request.num_drafter_tokens < first:
            request.num_drafter_tokens = size * self._num_complete(
                request.block_ids[: first // size]
            )
        if request.num_drafter_tokens < first:
            return False
        request.num_drafter_tokens = end = first + num_tokens
        for block_id in request.block_ids[first // size : end // size]:
            self._is_complete[block_id] = True
        return True

    def _num_complete(self, block_ids: Sequence[int]) -> int:
        """Leading ones."""
        flags = bytes(self._is_complete[block_id] for block_id in block_ids)
        return len(flags) if all(flags) else flags.index(0)

    def _may_draft(self, request: Request) -> bool:
        """Whether it may have drafts on the decode worker."""
        num_known = request.num_known_tokens
        return (
            request.decode_worker is not None
            and request.max_known_tokens - num_known >= _MIN_TOKENS_LEFT
            and num_known + _MIN_TOKENS_LEFT - 1 <= self._max_model_len
            and most_drafts_ever(self._policy, request) > 0
        )
