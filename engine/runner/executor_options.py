"""What an executor is told before it is built, besides its sizes.

All ranks are told the same, but for the scales of their own heads and for their memory.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.kv.scales import KvScales


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    # Whether `kv_store.digests` of all blocks that steps write are recorded.
    sends_blocks: bool = False
    # Of this rank's KV heads; a layout of e4m3 numbers needs them.
    kv_scales: KvScales | None = None
    # For which each row has room; 0 = no row has drafts.
    max_drafts: int = 0
    # Steps of at least so many tokens share them out between ranks, whose model must be able to
    # (`CausalLM.exchange_operations`). Graphs do so if it can be captured. None = no step does.
    min_exchanged_tokens: int | None = None
    # Whether ranks with rows of their own add up what experts give in the ranks' order, so that a
    # row's bits do not depend on the others.
    sums_in_order: bool = False
    # Graphs of up to so many tokens compute shared experts in a stream of their own; 0 = none does.
    second_stream_tokens: int = 0
    # [num_blocks, *block_shape], memory for K and V that another executor has, too; None = its own.
    blocks: Tensor | None = None


DEFAULT_OPTIONS = ExecutorOptions()
