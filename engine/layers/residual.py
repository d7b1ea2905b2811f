"""The residual stream of a flow between two parts of a layer, and the sum over ranks it may owe.

Operations and parts of operations: each reads and writes the fields of one `Flow`.
"""

from torch import Tensor

from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow
from engine.layers.token_exchange import gather_rows, scatter_rows
from kernels.quant.coded_tokens import InputForm


def sum_over_ranks(flow: Flow) -> None:
    """Now, or, where that is faster, with the norm that follows."""
    if flow.unsummed is not None:
        return  # there is a single rank
    fused = flow.ctx.fused_sums
    flow.owes_sum = True
    if fused is None or flow.residual is None or not fused.fits(flow.x):
        settle(flow)


def settle(flow: Flow) -> None:
    """Takes what sums the flow owes, so that `x` is the output of the part before."""
    if flow.unsummed is not None:
        flow.x, flow.unsummed = flow.unsummed.sum(), None
    if flow.owes_sum:
        flow.x = flow.ctx.comm.all_reduce(flow.x)
        flow.owes_sum = False
    if flow.owes_share:
        flow.x = scatter_rows(flow.x, flow.ctx.comm)
        flow.owes_share = False


def add_and_norm(flow: Flow, norm: RmsNorm, form: InputForm | None = None) -> Tensor:
    """Adds `x` to the residual stream and normalises that into `x`; returns the stream.

    form: of what comes next: where it can be, the norm is coded so, into `coded` alone.
    """
    fused = flow.ctx.fused_sums
    if flow.owes_sum and fused is not None and flow.residual is not None:
        flow.x, flow.residual = norm.add_sum(flow.x, flow.residual, fused)
        flow.owes_sum = False
        return flow.residual
    if flow.owes_share and fused is not None and flow.residual is not None:
        flow.x, flow.residual = norm.add_share(flow.x, flow.residual, fused)
        flow.owes_share = False
        return flow.residual
    if flow.unsummed is not None and flow.residual is not None and form is None:
        flow.x, flow.residual = norm.add_unsummed(flow.unsummed, flow.residual)
        flow.unsummed = None
        return flow.residual
    settle(flow)
    if form is None:
        flow.x, flow.residual = norm.add(flow.x, flow.residual)
    else:
        coded, flow.residual = norm.add_coded(flow.x, flow.residual, form)
        flow.leave(coded=coded)
    return flow.residual


def scatter_flow(flow: Flow) -> None:
    """This rank's rows of the sum over the ranks: now, or with the norm that follows."""
    fused = flow.ctx.fused_sums
    flow.owes_share = True
    if fused is None or flow.residual is None or not fused.fits_share(flow.x):
        settle(flow)


def gather_flow(flow: Flow) -> None:
    flow.x = gather_rows(flow.x, len(flow.ctx.slots), flow.ctx.comm)


def keep_chosen(flow: Flow) -> None:
    """What comes out of the last layer: the tokens whose hidden states are asked for."""
    if flow.chosen is None:
        return
    flow.has_ended = len(flow.chosen) == 0
    flow.x = flow.x.index_select(0, flow.chosen)
    if flow.residual is not None:
        flow.residual = flow.residual.index_select(0, flow.chosen)
