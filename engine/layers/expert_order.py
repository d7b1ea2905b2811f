"""Experts whose weights have an order of inputs of their own (GPTQ's desc_act, actorder).

    column j of expert e's data is for input order[e, j]

The inputs of `down` are outputs of gate and up, so their rows are put in that order once, when the
model is built. Gate's and up's own inputs have to be gathered at each step, for each route.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.linear import LinearWeight
from engine.layers.quantized_weight import Scales, compacted


def take_orders(
    gate_up: LinearWeight, down: LinearWeight
) -> tuple[LinearWeight, LinearWeight, Tensor | None]:
    """The same experts, `down` without an order; writes to the memory of `gate_up`.

    gate_up: [experts, 2 n, hidden], down: [experts, hidden, n], both quantised or not. Returns
    gate_up's own order besides, int32 [experts, hidden]; None = its inputs are in order.
    """
    of_down = _order_of(down)
    if of_down is not None:
        _move_rows(gate_up, of_down)
        down = _without_order(down)
    of_gate_up = _order_of(gate_up)
    if of_gate_up is None:
        return gate_up, down, None
    return _without_order(gate_up), down, of_gate_up.to(torch.int32)


def _order_of(weight: LinearWeight) -> Tensor | None:
    return None if weight.scales is None else compacted(weight.scales).order


def _without_order(weight: LinearWeight) -> LinearWeight:
    assert weight.scales is not None, "only quantised weights have one"
    return replace(weight, scales=replace(weight.scales, order=None))


def _move_rows(gate_up: LinearWeight, order: Tensor) -> None:
    """Row j of each half becomes what row order[e, j] was."""
    tensors = [gate_up.data, gate_up.bias, *_of_rows(gate_up.scales)]
    half = order.shape[1]
    for expert, rows in enumerate(order):
        places = torch.cat((rows, rows + half))
        for tensor in tensors:
            if tensor is not None:
                tensor[expert] = tensor[expert][places]


def _of_rows(scales: Scales | None) -> list[Tensor | None]:
    if scales is None:
        return []
    assert scales.rows == 1, f"{scales.rows} rows share a scale, and cannot be moved apart"
    return [scales.values, scales.zeros, scales.factors]
