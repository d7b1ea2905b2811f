"""An executor whose steps have been measured, where the configuration needs that."""

from dataclasses import dataclass

from engine.models.feature_head import FeatureHead
from engine.runner.auto import Calibration, Limits, StepSizes
from engine.runner.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExecutor:
    """An executor, and what is known of it before its first request."""

    executor: Executor
    limits: Limits
    calibration: Calibration | None
    graph_token_sizes: tuple[int, ...]
    verify_token_sizes: tuple[int, ...]
    sizes: StepSizes
    num_staged: int = 0  # blocks of a GPU's memory that are left for its host tier
    head: FeatureHead | None = None  # that drafts
