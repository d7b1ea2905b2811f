"""Memory that NCCL may still use, since the abort of its group failed or has not ended.

Freed, it would be given to somebody else, a model's step for one, and NCCL would write there.
"""

import logging

from torch import Tensor

logger = logging.getLogger(__name__)

_kept: list[Tensor] = []


def keep_for_good(data: Tensor) -> None:
    """Keeps `data` until this process ends, and says so. May be called from any thread."""
    _kept.append(data)
    logger.error(
        "%d bytes on %s are kept until this process ends: NCCL, which was not aborted, may still"
        " write there",
        data.untyped_storage().nbytes(),
        data.device,
    )
