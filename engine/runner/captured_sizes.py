"""Which steps are captured in CUDA graphs: by the configuration, and by what the backends can.

The sizes themselves are of graph_sizes.py and grid_sizes.py.
"""

import logging

from configs.schema import AppConfig, LapsConfig, SpeculationConfig
from engine.errors import ConfigError
from engine.runner.auto import StepSizes
from engine.runner.graph_sizes import (
    MAX_LATENT_TOKENS,
    GraphSize,
    PromptSizes,
    ragged_sizes,
    verify_sizes,
)
from engine.runner.grid_sizes import grid_sizes
from kernels.attention.phased import Phases

logger = logging.getLogger(__name__)


def replays_graphs(config: AppConfig, attention: Phases) -> bool:
    """Whether decode steps replay CUDA graphs. ConfigError if requested but impossible."""
    asked = config.execution.cuda_graphs
    if asked and not attention.can_capture:
        raise ConfigError(
            "execution.cuda_graphs: the decode backend cannot be captured; set"
            " model.attention.decode to triton, flashinfer or flash_attn, or leave it out"
        )
    if asked is None:
        return config.model.device == "cuda" and attention.can_capture
    return asked


def build_prompt_sizes(
    laps: LapsConfig,
    sizes: StepSizes,
    attention: Phases,
    *,
    uses_graphs: bool,
    is_latent: bool = False,
    has_dp_attention: bool = False,
) -> PromptSizes | None:
    """The prompt steps to capture; None = none. ConfigError if requested but impossible."""
    asked, is_grid = laps.enable_batch_prefill_cuda_graph, laps.batch_prefill_form == "grid"
    if has_dp_attention and not asked:
        return None  # all ranks' rows are padded to the longest of any: not without being asked
    is_possible = uses_graphs and attention.can_capture_prompts
    if (asked or is_grid) and not is_possible:
        key = "enable_batch_prefill_cuda_graph" if asked else "batch_prefill_form: grid"
        raise ConfigError(f"laps.{key}: {_why_no_prompt_graphs(uses_graphs=uses_graphs)}")
    if asked is False or not is_possible:
        return None
    if is_grid:
        return grid_sizes(
            laps.batch_prefill_batch_sizes,
            laps.batch_prefill_seq_lengths,
            max_row_tokens=laps.batch_prefill_max_seq_len,
        )
    max_tokens = min(sizes.max_tokens, MAX_LATENT_TOKENS) if is_latent else sizes.max_tokens
    return ragged_sizes(sizes.max_rows, max_tokens, max_graph_rows=sizes.max_graph_rows)


def build_verify_sizes(
    asked: SpeculationConfig, sizes: StepSizes, attention: Phases, *, uses_graphs: bool
) -> list[GraphSize]:
    """The steps with drafts to capture. ConfigError if requested but impossible.

    Logs why there are none where `auto` would have had some.
    """
    if asked.drafter == "none" or sizes.max_verify_tokens == 0:
        return []
    if not (uses_graphs and attention.can_capture_verification):
        if asked.max_graph_tokens == "auto":
            logger.info(
                "steps with drafts replay no graphs of their own: execution.cuda_graphs is off, or"
                " what verifies cannot be captured (speculation.attention_backend, model.attention)"
            )
            return []
        raise ConfigError(
            "speculation.max_graph_tokens: the backend that verifies cannot be captured; set"
            " speculation.attention_backend to decode with model.attention.decode triton, or"
            " model.attention.prefill to flash_attn or triton, or leave the key out"
        )
    most = min(sizes.max_rows * (1 + asked.max_drafts), sizes.max_tokens, sizes.max_verify_tokens)
    return verify_sizes(sizes.max_rows, most) if most > 1 else []


def _why_no_prompt_graphs(*, uses_graphs: bool) -> str:
    if not uses_graphs:
        return (
            "decode steps replay no graphs here, so prompts cannot; set model.attention.decode to"
            " triton, flashinfer or flash_attn, or leave the key out"
        )
    return (
        "the prefill backend cannot be captured; set model.attention.prefill to flash_attn or"
        " triton, or leave the key out"
    )
