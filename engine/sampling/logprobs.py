"""Log-probabilities as the client asked: of the chosen token and of the k best.

They are the model's own, from logits before any processing; how the token came to be chosen is not
known here.
"""

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import positions_of, take
from engine.scheduling.plan import TokenLogprobs


class Logprobs:
    """Reads log-probabilities for the rows that want them; changes nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_best: dict[int, int] = {}  # row -> k >= 0

    def add(self, row: int, params: SamplingParams) -> None:
        if params.logprobs is not None:
            self._num_best[row] = min(params.logprobs, self._vocab_size)

    def remove(self, row: int) -> None:
        self._num_best.pop(row, None)

    def apply(
        self, logits: Tensor, rows: list[int], token_ids: list[int], is_finite: list[bool]
    ) -> list[TokenLogprobs | None]:
        """One entry per row: None for rows that did not ask or drew nothing.

        logits: fp32 [S, vocab], unprocessed, left as they are.
        """
        found: list[TokenLogprobs | None] = [None] * len(rows)
        positions = [i for i in positions_of(rows, self._num_best) if is_finite[i]]
        if not positions:
            return found
        part = take(logits, positions)
        logprobs = part.log_softmax(dim=-1)  # [P, vocab]
        drawn = torch.tensor([token_ids[i] for i in positions], device=part.device).unsqueeze(1)
        chosen: list[float] = logprobs.gather(1, drawn).squeeze(1).tolist()
        limits = [self._num_best[rows[i]] for i in positions]
        best_ids = best_tokens(part, max(limits))  # [P, max k]
        best = logprobs.gather(1, best_ids)
        # A token the model itself rules out (-inf) is no alternative, so it is not listed.
        num_listed = best.isfinite().sum(dim=-1).tolist()
        listed = zip(positions, limits, num_listed, best_ids.tolist(), best.tolist(), strict=True)
        for p, (position, limit, num_finite, ids, values) in enumerate(listed):
            k = min(limit, num_finite)
            found[position] = TokenLogprobs(chosen[p], ids[:k], values[:k])
        return found


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row of fp32 [P, vocab], best first, int64 [P, k].

    Equal logits are ordered by lower id: the values become integers of the same order, and the id
    fills the low half of the key, so that no two keys are equal and `topk` has no choice.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(vocab_size, device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
