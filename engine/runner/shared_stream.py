"""Computes the expert that all tokens pass in a stream of its own, beside the router's experts.

    compute         norm   begin   router   experts   wait, sum
    second stream          shared expert    done

In graphs of few tokens, whose kernels leave multiprocessors idle: beyond, either stream fills the
GPU and both only take turns. On a CPU the operations run one after the other, with the same result.
"""

from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import ForwardContext
from engine.layers.operations import Lane
from engine.layers.schedules import DUAL_STREAM, InlineLanes, Lanes, bind, drive
from engine.layers.stream_lanes import StreamLanes
from engine.models.llama import CausalLM, ForwardResult


class SharedExpertStream:
    """`CausalLM.forward` by the schedule `DUAL_STREAM`."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        """max_tokens: of a step. Raises ConfigError for a model without shared experts."""
        if not any(op.lane is Lane.SECOND_STREAM for ops in model.operations for op in ops):
            raise ConfigError(
                "execution.dual_stream_token_threshold: the model has no shared experts, so nothing"
                " runs beside the others; set it to 0"
            )
        self._model = model
        self._max_tokens = max_tokens
        self._stages = bind(model.operations, DUAL_STREAM)
        self._exchange_stages = (
            bind(model.exchange_operations, DUAL_STREAM) if model.can_capture_exchange else ()
        )
        is_cuda = model.device.type == "cuda"
        self._lanes: Lanes = (
            StreamLanes(model.device, (Lane.SECOND_STREAM,)) if is_cuda else InlineLanes()
        )

    def covers(self, num_tokens: int) -> bool:
        return num_tokens <= self._max_tokens

    def forward(
        self,
        input_ids: Tensor,
        ctx: ForwardContext,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
    ) -> ForwardResult:
        """See `CausalLM.forward`."""
        flow = self._model.begin(input_ids, ctx, logit_indices, checks_finite=checks_finite)
        stages = self._exchange_stages if ctx.exchanges else self._stages
        drive(stages, [flow], self._lanes)
        return self._model.result(flow)
