"""Looks up on the device what followed the end of a row's text the last time, in the text itself.

    text    ... d e f g x y z ... d e f g      longest end seen before: d e f g
                        drafts: x y z          what followed it

The rule of `engine.speculation.ngram` over all places of one text: the longest match of at most
`max_match` tokens, the newest of equal ones; drafts that pass the text's end go on with themselves.
A text without a match of `min_match` tokens gets its last token as every draft. Where a text ends
is known on the device alone: its planned length less its row's shortfall (`kernels.guesses`). What
the text got since the last time is written first. Nothing waits for the device. Tensors are int32
unless stated.
"""

import torch
from torch import Tensor

from kernels.guessed_steps import RowStates, TextChanges


def look_up(
    texts: Tensor,
    changes: TextChanges,
    states: RowStates,
    drafts: Tensor,
    *,
    min_match: int,
    max_match: int,
) -> None:
    """Change the texts of some rows, and write the drafts of each.

    texts: [max_rows + 1, L], a row's tokens from its first. drafts: [E, max_rows + 1].
    """
    assert 1 <= min_match <= max_match, f"{min_match} to {max_match}"
    if texts.is_cuda:
        from kernels.ngrams_triton import look_up as on_gpu  # a CPU needs no Triton

        on_gpu(texts, changes, states, drafts, min_match=min_match, max_match=max_match)
        return
    _change(texts, changes, states.samples)
    rows, planned, _, _ = changes.heads[:-1].long().unbind(1)
    lengths = (planned - states.shortfalls[rows])[:, None]  # [G, 1]
    text = texts[rows, : int(lengths.max())]  # [G, longest]
    places = torch.arange(text.shape[1])
    alive = (places < lengths) & (places >= min_match)
    num_equal = torch.zeros_like(text, dtype=torch.int64)
    for back in range(1, max_match + 1):
        if not alive.any():
            break
        last = text.gather(1, (lengths - back).clamp(min=0))
        alive = alive & (text.roll(back, 1) == last) & (places >= back) & (lengths >= back)
        num_equal += alive
    ranked = num_equal * text.shape[1] + places
    best, place = ranked.where(num_equal >= min_match, -1).max(1, keepdim=True)
    place = place.where(best >= 0, lengths - 1)
    sources = place + torch.arange(len(drafts)) % (lengths - place)  # [G, E]
    drafts[:, rows] = text.gather(1, sources).T


def _change(texts: Tensor, changes: TextChanges, samples: Tensor) -> None:
    """Write the pieces, then the tokens in flight at the end of each text."""
    rows, lengths, in_flight, _ = changes.heads[:-1].long().unbind(1)
    if changes.num_pieces:
        starts, _, counts = changes.pieces.long().unbind(1)
        owners = rows.repeat_interleave(changes.heads[:, 3].long().diff())
        texts[owners.repeat_interleave(counts), _ranges(starts, counts)] = changes.tokens
    flying = rows.repeat_interleave(in_flight)
    within = _ranges(torch.zeros_like(in_flight), in_flight)
    texts[flying, _ranges(lengths - in_flight, in_flight)] = samples[within, flying]


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """[starts[0], starts[0] + 1, ...(counts[0] of them), starts[1], ...]"""
    before = counts.cumsum(0) - counts
    return (starts - before).repeat_interleave(counts) + torch.arange(int(counts.sum()))
