"""A mixture of experts in torch: the oracle on a GPU, the implementation on a CPU.

    p = softmax(x Wr^T (+ br));  the k largest p are the token's experts and their weights
    y = sum over its experts e of  weight_e  down_e(silu(gate_e(x)) * up_e(x))   (or form.py)

The sums of a token run over its experts in the order of their weights. arXiv:2401.04088, with the
routing of transformers. Knows shapes, and nothing of models, requests or devices.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.moe.form import PLAIN, ExpertForm, bias_of
from kernels.moe.routes import Routes, Selection


def route(
    x: Tensor,
    weight: Tensor,
    num_active: int,
    *,
    normalises: bool,
    slots: Tensor | None = None,
    bias: Tensor | None = None,
    selection: Selection | None = None,
) -> Routes:
    """The `num_active` best experts of each token; of equal ones those with the lower index.

    x: [T, hidden], weight: [experts, hidden]; logits are products in fp32. normalises: divide a
    token's weights by their sum. slots: int [T], -1 for tokens that get no expert; None = none.
    bias: [experts], of the logits. selection: None = those of the largest softmax.
    """
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if selection is None:
        ordered, experts = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, ids = ordered[:, :num_active], experts[:, :num_active].int()
    else:
        weights, ids = _select(logits, num_active, selection)
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if selection is not None:
        weights = weights * selection.scale
    if slots is not None:
        ids = ids.masked_fill((slots < 0)[:, None], -1)
    return Routes(ids=ids, weights=weights)


def _select(logits: Tensor, num_active: int, selection: Selection) -> tuple[Tensor, Tensor]:
    """Scores and int32 indices of each token's experts, [T, k], best first."""
    is_sigmoid = selection.scores == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
    scores = scores + (logits - logits)  # not finite where a logit is not
    ranked = scores if selection.bias is None else scores + selection.bias
    by_group = ranked.unflatten(1, (selection.num_groups, -1))
    best = by_group.topk(2 if is_sigmoid else 1, dim=-1).values.sum(dim=-1)
    groups = best.sort(dim=-1, descending=True, stable=True).indices
    is_chosen = torch.zeros_like(best, dtype=torch.bool)
    is_chosen.scatter_(1, groups[:, : selection.num_chosen_groups], True)
    ranked = by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :num_active]
    return scores.gather(1, experts), experts.int()


def held_routes(routes: Routes, held: range) -> Routes:
    """The routes with indices among the experts `held`, -1 for all others."""
    own = routes.ids - held.start
    is_held = (own >= 0) & (own < len(held))
    return Routes(ids=own.where(is_held, -1), weights=routes.weights)


def count_routes(routes: Routes, counts: Tensor) -> None:
    """Adds every expert's routes to counts, int64 [experts]; -1 does not count."""
    counts += torch.bincount(routes.ids.flatten() + 1, minlength=len(counts) + 1)[1:]


def routes_by_expert(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every expert that has routes, ascending, with the indices of its routes, ascending.

    ids: int [T, k]; a route's index is t k + j. Reads `ids` on the host.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    found, counts = flat.unique(return_counts=True)  # ascending
    for expert, routes in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        if expert >= 0:
            yield expert, routes


class ExpertMatrices(Protocol):
    """One matrix an expert, [out, in]: a tensor, or what makes one when it is asked for."""

    @property
    def shape(self) -> torch.Size:
        """[experts, out, in]."""
        ...

    def __getitem__(self, expert: int, /) -> Tensor: ...


def experts(
    x: Tensor,
    routes: Routes,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    form: ExpertForm = PLAIN,
) -> Tensor:
    """The weighted output of every route, [T, k, hidden]; zeros where a route has no expert.

    x: [T, hidden], gate_up: [experts, 2 I, hidden], gate's rows first, down: [experts, hidden, I].
    """
    num_tokens, num_active = routes.ids.shape
    weights = routes.weights.flatten()
    outputs = x.new_zeros((num_tokens * num_active, down.shape[1]))
    for expert, indices in routes_by_expert(routes.ids):
        tokens = x.index_select(0, indices // num_active)
        inner = form.gated(F.linear(tokens, gate_up[expert], bias_of(form.gate_up_bias, expert)))
        y = F.linear(inner, down[expert], bias_of(form.down_bias, expert))
        y = y * weights[indices, None]
        outputs.index_copy_(0, indices, y.to(x.dtype))
    return outputs.view(num_tokens, num_active, down.shape[1])


def combine(outputs: Tensor, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """Sum over a token's experts, plus sigmoid(gate) * shared where there is a shared expert.

    outputs: [T, k, hidden], shared: [T, hidden], gate: [T, 1], None = 1 instead of its sigmoid;
    returns [T, hidden]. Added one after the other in fp32, rounded once.
    """
    total = outputs[:, 0].float()
    for expert in range(1, outputs.shape[1]):
        total = total + outputs[:, expert].float()
    if shared is not None:
        share = 1.0 if gate is None else torch.sigmoid(gate.float())
        total = total + share * shared.float()
    return total.to(outputs.dtype)
