"""Where FlashAttention-3 is installed, and what "auto" takes where it is not."""

import importlib.util
import logging
from functools import cache

from kernels.attention.names import AttentionName

logger = logging.getLogger(__name__)

_HOMES = ("vllm.vllm_flash_attn", "vllm_flash_attn")


def flash_attn_home() -> str | None:
    """The module that has it; only looks for a folder and imports nothing. None = there is none."""
    for home in _HOMES:
        if importlib.util.find_spec(home.partition(".")[0]) is not None:
            return home
    return None


def installed_or_triton(chosen: AttentionName) -> AttentionName:
    """What "auto" takes of what is installed, so that a start without vLLM is no error.

    A warning says what that costs: 634 beside 441 TFLOP/s at 4 prompts of 16,000 tokens
    (load_tests/results/attention.md).
    """
    if chosen != "flash_attn" or flash_attn_home() is not None:
        return chosen
    warn_of_triton()
    return "triton"


@cache  # a start builds attention several times
def warn_of_triton() -> None:
    logger.warning(
        "model.attention.prefill: Triton's kernels compute prompts, since FlashAttention-3, with "
        "up to 1.5 times their rate on this GPU, is not installed; `pip install vllm` brings it, "
        "and `triton` in place of `auto` ends this warning"
    )
