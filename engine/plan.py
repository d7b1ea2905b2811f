"""Data types for one step: `StepPlan` says what to compute, `StepResult` what came out.

Columnar, free of tensors and encodable, so that a leader can broadcast a plan to rank actors. Every
list marked [R] has one entry per scheduled row, in the same order.
"""

import msgspec

from engine.request import PromptLogprobs, SamplingParams

NEWEST = -1  # as a draft: see `StepPlan.drafts`


def given(place: int) -> int:
    """As a draft: entry number `place` of what another executor left for the row on the device.

    For a model that drafts, the samples of the target's newest step; for the target, its drafts,
    or what it finds in the row's text before it computes.
    """
    return NEWEST - 1 - place


def all_given(num_places: int) -> list[int]:
    """`given` of the first so many places."""
    return list(range(given(0), given(num_places), -1))


class RowAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """A request entering a device row (new, handed over, or back after preemption)."""

    row: int
    token_ids: list[int]  # all known tokens: prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int = 0  # their K and V are in the blocks; no step computes them again


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, in this order: zero blocks, release rows, admit rows, append blocks, run.

    Row r of the plan computes tokens [num_computed_tokens[r], num_computed_tokens[r] +
    num_new_tokens[r]) of its request and samples after each of the last num_samples[r] of them.
    A plan may be launched while the previous one computes. A row that samples in the previous plan
    then computes that token in this one, and only the device knows its id. What a row with a
    constraint may sample depends on that id: it is computed at once, and samples when the previous
    plan has ended (`awaited_rows`).

    A row with drafts (`drafts`) knows `its tokens, then its drafts` for this step only. It samples
    after each of its last num_samples[r] positions as if the drafts before were its tokens. Which
    of these samples count is decided when they are known (engine/speculation/acceptance.py). A
    later plan names the tokens that it got. The next one cannot if it is launched before: then the
    row is planned as if all its drafts were right (`ahead`, `open_ended`), with `NEWEST` for what
    the step in flight gives, and the device moves it to where it is. A row whose request knows
    tokens 0 to 9:

        drafts                         computed  new  samples
        none                                  9    1        1   token 9
        [7, 8]                                9    3        3   token 9, then drafts 7 and 8
        [given(0), given(1)]                  9    3        3   likewise; the device has the drafts
        [NEWEST, NEWEST, given(0)]           11    2        2   `ahead`: the step in flight gives
                                                                two tokens at most, 10 and 11; this
                                                                one computes 11, then a draft
        [given(0), given(1)]                 10    2        1   `open_ended`, of a model that
                                                                drafts: 10 and 11 are what the
                                                                target's step in flight gives
    """

    step: int
    zero_block_ids: list[int] = []  # non-finite content; available to other requests after commit
    released_rows: list[int] = []  # released since the last plan; may be re-admitted in this one
    admissions: list[RowAdmission] = []
    rows: list[int]  # [R] device row
    num_new_tokens: list[int]  # [R] >= 1
    num_computed_tokens: list[int]  # [R] history already in the KV store
    # [R] the last positions, whose logits are used to draw a token each, or which say what a
    # prompt-only request asks (max_tokens 0). 0 = KV only; more than 1 only for a row with drafts.
    num_samples: list[int]
    new_block_ids: list[list[int]]  # [R] blocks appended to the row's table before it runs
    # The newest token of each constrained row; its constraint accepts it before the row samples.
    accepted_tokens: list[tuple[int, int]] = []  # (row, token id)
    # Constrained rows whose newest token the previous plan draws: likewise, once it has ended.
    awaited_rows: list[int] = []
    # (index in the plan, drafts): what these rows sample does not become part of their history.
    # `NEWEST` in place of some: only the device has them. The row computes the last of these, its
    # newest token, and its choice does not depend on the others. `given(place)`: likewise.
    drafts: list[tuple[int, list[int]]] = []
    # Indices of rows in `drafts` that are planned as if the step in flight gave all tokens that it
    # may. What it gives less is taken off num_computed_tokens and off the number of `NEWEST`.
    ahead: list[int] = []
    # Of a model that drafts: the row's new tokens are samples of the target's step in flight, and
    # it samples after the last of them that counts.
    open_ended: list[int] = []
    # Indices of rows with new tokens of a prompt of which a draft model computes K and V, too; from
    # the plan on that admits the row.
    drafter_rows: list[int] = []
    # (row, token ids): tokens to append to the history of a row that was last in a plan's `drafts`.
    verified_tokens: list[tuple[int, list[int]]] = []
    # (row, index, token ids): what a row was not told of its text, from that index on; before index
    # 0 is what is quoted from other texts. There its drafts are looked up: `given(place)` is the
    # one numbered `place`.
    texts: list[tuple[int, int, list[int]]] = []
    # With DP attention, where every rank has requests of its own: the plans of all ranks, by rank.
    # Then all columns above are empty. A rank with nothing to do has an empty plan.
    of_ranks: list["StepPlan"] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    @property
    def awaits_tokens(self) -> bool:
        """Whether launching it waits for the end of the previous step, on some rank."""
        return any(plan.awaited_rows for plan in self.of_ranks or [self])

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token and samples the next; there is a row."""
        return all(self.num_samples) and max(self.num_new_tokens) == min(self.num_new_tokens) == 1


def empty_plan(step: int, of_ranks: list[StepPlan] | None = None) -> StepPlan:
    """A plan without rows of its own."""
    return StepPlan(
        step=step,
        rows=[],
        num_new_tokens=[],
        num_computed_tokens=[],
        num_samples=[],
        new_block_ids=[],
        of_ranks=of_ranks or [],
    )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities under the model's own distribution, before any logit processing."""

    chosen: float
    top_ids: list[int]  # best first, or as named by `SamplingParams.logprob_token_ids`
    top_logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor returns for a plan; rows are in the plan's order."""

    step: int
    tokens: list[list[int]]  # [R] sampled ids: at most num_samples[r] of them; prompt-only: none
    logprobs: list[list[TokenLogprobs] | None]  # [R] one per token; None = the row did not ask
    duration_s: float | None = None  # device time of this step alone; None = not measured
    is_finite: list[bool]  # [R] False = logits held NaN or +-inf everywhere: nothing was sampled
    # Index in the plan of rows with finite numbers of which nothing was sampled either: their
    # constraint allows no token.
    allows_nothing: list[int] = []
    # Index in the plan -> prompt scores, only for rows that ask for them.
    labels: dict[int, list[float]] = {}  # of prompt-only rows, once their prompt is computed
    embeddings: dict[int, bytes] = {}  # likewise; float32, as in `PromptScores`
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # of the tokens that follow the chunk's tokens
    of_ranks: list["StepResult"] = []  # of a plan with `of_ranks`, by rank; then the rest is empty
