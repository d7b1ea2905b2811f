"""A step between its forward pass and its sampling: what is queued, and in which order."""

import msgspec
from torch import Tensor

from engine.execution.input_batch import InputBatch
from engine.execution.prompt_logprobs import PromptTensors
from engine.execution.step_graphs import GraphOutput


class ComputedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's forward pass, queued."""

    batch: InputBatch
    logits: Tensor | None  # [S, vocab]; None = no row samples
    # by a graph, which kept each line's best token; None = without one
    replayed: GraphOutput | None
    # [T] bool; None = the logits tell
    is_finite_token: Tensor | None
    prompt: PromptTensors | None = None  # None = no row's prompt is asked about
