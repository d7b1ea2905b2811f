"""What every rank of a model for which a model drafts does in tests.

Other processes import this file, which is why it leaves out what takes seconds: transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine import build_drafting
from engine.core import PendingStep
from engine.engine import Engine
from engine.kv.transfer import OutgoingEvent
from engine.layers.context import Comm
from engine.messages import Role
from engine.models import registry
from engine.plan import StepPlan
from engine.scheduling.drafting import Drafting
from engine.speculation.draft_model import DraftModel
from tests.engine.ranks.exact_models import SnappingOps, snapped_mixtures
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact

_for_good = ExitStack()


@contextmanager
def exact_drafts() -> Iterator[None]:
    """Arithmetic is exact, in what drafts, too."""
    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        stack.enter_context(snapped_mixtures())
        for module in (build_drafting, registry):
            stack.enter_context(patch.object(module, "build_ops", lambda _: SnappingOps()))
        yield


def nums_missing(drafting: Drafting) -> list[int]:
    """Prompt tokens that a draft model computes of each row it takes on, from now on."""
    drafter, found = drafting.drafter, list[int]()
    assert isinstance(drafter, DraftModel)
    launch = drafter._launch

    def watched(plan: StepPlan) -> PendingStep:
        found.extend(one.num_prompt_tokens - one.num_computed_tokens for one in plan.admissions)
        return launch(plan)

    drafter._launch = watched
    return found


def start_drafting(
    comm: Comm,
    folder: str,
    settings: dict[str, Any],
    role: Role = "unified",
    notify: Callable[[OutgoingEvent], None] | None = None,
) -> Engine:
    """Of a model of whole numbers, by `settings`; else with MTP, and room for two requests.

    role, notify: as of `start_exact`. The first rank steps it within `exact_drafts`; others are in
    that for as long as they live.
    """
    if comm.rank.index > 0:
        _for_good.enter_context(exact_drafts())
    given: dict[str, Any] = {
        "speculation__drafter": "mtp",
        "speculation__max_drafts": 4,
        "speculation__max_temperature": 9.0,
        "cache__num_blocks": 18,
        "model__max_model_len": 64,
    }
    return start_exact(Path(folder), comm=comm, role=role, notify=notify, **{**given, **settings})
