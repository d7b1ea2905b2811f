"""Samples the next token of every row from its logits, with log-probabilities.

Knows logits, rows and sampling parameters, and nothing of models, blocks, stop conditions or text.
All randomness is `kernels.sampling.noise`: no generator, no state besides each row's own history.
On a GPU it only launches and never waits for the device, so the next step can be launched before
this one's tokens are known to the host.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.bias import LogitBias, MinTokens
from engine.sampling.constraint import Constraints, Matchers, NoMatchers
from engine.sampling.draw import build_draw
from engine.sampling.feature import Ahead, LogitFeature, at, lines_ahead, positions_of
from engine.sampling.logprobs import Labels, Logprobs
from engine.sampling.penalties import OccurrencePenalty, RepetitionPenalty
from engine.sampling.sampled import SampledTensors
from engine.sampling.staging import Staging
from kernels.sampling.choices import GreedyChoice
from kernels.sampling.rows import greedy as greedy_choice

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Sampler:
    """Draws the next token of each row. In this order, on fp32 logits:

    1. logit_bias          added to the named tokens, before everything else, as in vLLM. A bias of
                           +-100 forces or excludes by its size, as OpenAI documents. It is finite,
                           so logits that differ by more than that outweigh it.
    2. repetition_penalty  p > 1 discourages tokens of prompt and output: positive logits / p,
                           negative * p (Hugging Face, vLLM; OpenAI has no such parameter).
    3. frequency_penalty,  logit - f * count - p * (count > 0), over output tokens only, never the
       presence_penalty    prompt: OpenAI's formula with vLLM's reading of "the text so far".
    4. min_tokens          eos and stop_token_ids are banned while fewer output tokens exist (vLLM).
                           With ignore_eos the model's eos ids are not banned, but they do not stop
                           either (in the scheduler); stop_token_ids are still banned.
    5. constraint          tokens after which the output could not satisfy it are banned; eos is
                           allowed only where the output is complete. A constrained row must
                           `accept_token` its newest token before it samples the next.
    6. temperature         0: the argmax of the logits so far, lowest id among equals, without noise
                           and without 7-10. Above 0: divides. A small value does not switch to
                           another mode (vLLM: below 1e-5 is greedy): 1e-6 draws the best token,
                           and draws among exact equals.
    7. top_k               keeps every logit >= the k-th largest; all ties at the k-th stay, so more
                           than k may. 0, or k >= vocabulary: all (vLLM also accepts -1; the edge
                           maps it).
    8. top_p               keeps the smallest set of best tokens, of those left and renormalised,
                           with mass >= top_p, at least one; tokens equal to the last all stay.
    9. min_p               keeps tokens with at least min_p times the largest probability, after
                           temperature. Last, as in Hugging Face; vLLM applies it before top_k and
                           top_p, which can differ when min_p and top_p are used together.
    10. noise              argmax(logit + Gumbel(seed, index, token)) is a draw from softmax(logit).
                           index = output tokens so far, across preemption and migration: the same
                           seed continues the same answer whatever else is in the batch. OpenAI
                           promises best effort for `seed`; here only different logits can change
                           the result.

    logprobs are the model's own: log_softmax of the unprocessed logits, vLLM's default and what
    OpenAI users see at temperature 1. Best first, lower id among equals; tokens at -inf are not
    listed. A row may name the tokens instead (`logprob_token_ids`); these are always listed.

    For a prompt-only row (max_tokens 0) nothing is drawn. It gets its labels' log-probabilities,
    also the model's own; its entry among the tokens only says whether its logits are finite.

    A row is not finite when its logits hold NaN or +inf or nothing above -inf, or when bans and
    penalties left it no finite logit. Other rows are unaffected. The row's own history is invalid
    from then on, because later steps may be launched before the host knows.

    Row tables on the device change in stream order: call every method on one stream.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        matchers: Matchers | None = None,
    ) -> None:
        """matchers: for rows with a constraint; None = no row has one."""
        assert all(0 <= i < vocab_size for i in eos_token_ids), f"eos ids {eos_token_ids}"
        staging = Staging(torch.device(device))
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._staging = staging
        self._constraints = Constraints(
            vocab_size, eos_token_ids, matchers or NoMatchers(), staging.device
        )
        self._adjustments: tuple[LogitFeature, ...] = (  # for greedy rows too
            LogitBias(vocab_size, staging),
            RepetitionPenalty(vocab_size, max_rows, staging),
            OccurrencePenalty(vocab_size, max_rows, staging),
            MinTokens(vocab_size, eos_token_ids, staging),
            self._constraints,
        )
        self._draw = build_draw(vocab_size, max_rows, staging)  # for rows with a temperature
        self._logprobs = Logprobs(vocab_size, staging)
        self._labels = Labels(staging)  # for prompt-only rows
        self._rows: set[int] = set()
        self._known_rows: list[int] | None = None  # of the last step; None = rows changed since
        self._adjusted_rows: set[int] = set()
        self._special_rows: set[int] = set()  # need more than the argmax of their logits

    @torch.inference_mode()
    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """A request enters `row` with the output tokens it already has, wherever they were made.

        Drawing continues exactly where it stopped after `output_ids`. Earlier launched steps are
        not affected and not waited for.
        """
        assert 0 <= row < self._max_rows, f"row {row} of {self._max_rows}"
        assert row not in self._rows, f"row {row} is in use"
        self._rows.add(row)
        self._known_rows = None
        if params.is_prompt_only:
            self._labels.add(row, params)
            self._special_rows.add(row)
            return
        for feature in self._adjustments:
            if feature.add(row, params, prompt_ids, output_ids):
                self._adjusted_rows.add(row)
        self._draw.add(row, params, prompt_ids, output_ids)
        self._logprobs.add(row, params)
        if row in self._adjusted_rows or row in self._draw or row in self._logprobs:
            self._special_rows.add(row)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """The request leaves `row`; its history is forgotten."""
        self._rows.remove(row)
        self._known_rows = None
        self._adjusted_rows.discard(row)
        self._special_rows.discard(row)
        self._draw.remove(row)
        self._logprobs.remove(row)
        self._labels.remove(row)
        for feature in self._adjustments:
            feature.remove(row)

    def accept_token(self, row: int, token_id: int) -> None:
        """Pass a constrained row's newest token to its constraint, before the row samples again."""
        self._constraints.accept_token(row, token_id)

    @torch.inference_mode()
    def append(self, tokens_of_rows: Sequence[tuple[int, list[int]]]) -> None:
        """Append tokens to the histories of rows whose last lines had drafts; each row once."""
        if not self._special_rows:
            return
        # The others have no history.
        special = [(row, ids) for row, ids in tokens_of_rows if row in self._special_rows]
        for row, token_ids in special:
            if row in self._constraints:
                for token_id in token_ids:
                    self._constraints.accept_token(row, token_id)
        for place in range(max((len(ids) for _, ids in special), default=0)):
            here = [(row, ids[place]) for row, ids in special if place < len(ids)]
            self._draw.observe([row for row, _ in here])
            adjusted = [(row, token_id) for row, token_id in here if row in self._adjusted_rows]
            if adjusted:
                drawn = self._staging.indices([token_id for _, token_id in adjusted])
                for feature in self._adjustments:
                    feature.observe([row for row, _ in adjusted], drawn)

    def is_plain(self, rows: list[int]) -> bool:
        """Whether none of `rows` needs anything but the argmax of its logits."""
        return not self._special_rows or self._special_rows.isdisjoint(rows)

    def take(self, rows: list[int], best: GreedyChoice) -> SampledTensors:
        """`best` as what was drawn for `rows`, which are plain: `sample` without the logits."""
        if rows is not self._known_rows:  # usually a step decodes the same rows as the last one
            assert self._rows.issuperset(rows), f"a row never added in {rows}"
            self._known_rows = rows
        return SampledTensors(token_ids=best.token_ids, is_finite=best.is_finite, logprobs=None)

    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        greedy: GreedyChoice | None = None,
        drafts: Mapping[int, Sequence[int]] | None = None,
        behind: Tensor | None = None,
    ) -> SampledTensors:
        """Draw one token for each of `rows` that asks for one, and advance their history.

        logits: fp32, bf16 or fp16 [S, vocab], one line per row in the same order; not changed.
        Rows come in any order, each at most once, in a list that must not change later. `greedy`:
        the result of `kernels.sampling.rows.greedy` for these logits, if already known; not
        changed. On a GPU the result's tensors are still being computed; they may be those of
        `greedy` itself.

        drafts: by row. Such a row may have several lines, side by side. The last of them is drawn
        as if all its drafts were part of its history, the one before as if all but the last were,
        and so on. Its history does not advance; `append` does that once the tokens are known.

        behind: int32 [S], on the device: so many tokens fewer precede a line than the drafts say.
        None = they are right; above 0 only for rows of which earlier tokens and their number change
        nothing but the index of the noise.
        """
        self._check(logits, rows, drafts or {})
        if greedy is None or not self.is_plain(rows):
            return self._sample(logits, rows, greedy, drafts or {}, behind)
        return SampledTensors(token_ids=greedy.token_ids, is_finite=greedy.is_finite, logprobs=None)

    @torch.inference_mode()
    def _sample(
        self,
        logits: Tensor,
        rows: list[int],
        greedy: GreedyChoice | None,
        drafts: Mapping[int, Sequence[int]],
        behind: Tensor | None,
    ) -> SampledTensors:
        choice = of_model = greedy if greedy is not None else greedy_choice(logits)
        if self.is_plain(rows):
            return SampledTensors(
                token_ids=choice.token_ids, is_finite=choice.is_finite, logprobs=None
            )
        ahead = lines_ahead(rows, drafts) if drafts else None
        adjusted = positions_of(rows, self._adjusted_rows)
        if adjusted:
            part = self._choose_adjusted(logits, rows, adjusted, ahead, behind)
            choice = self._merge(choice, adjusted, part)
        drawn = [p for p in positions_of(rows, self._draw) if rows[p] not in self._adjusted_rows]
        if drawn:
            members = [rows[p] for p in drawn]
            its_behind = self._of_lines(behind, drawn)
            part = self._draw.choose(logits, drawn, members, at(ahead, drawn), its_behind)
            choice = self._merge(choice, drawn, part)
        self._observe(rows, choice, drafts, is_adjusted=bool(adjusted))
        return SampledTensors(
            token_ids=choice.token_ids,
            is_finite=choice.is_finite,
            allows_nothing=of_model.is_finite & ~choice.is_finite if adjusted else None,
            logprobs=self._logprobs.read(logits, rows, choice),
            labels=self._labels.read(logits, rows),
        )

    def _observe(
        self,
        rows: list[int],
        choice: GreedyChoice,
        drafts: Mapping[int, Sequence[int]],
        *,
        is_adjusted: bool,
    ) -> None:
        """Advance the history of all rows without drafts."""
        token_ids = choice.token_ids
        if drafts:
            positions = [p for p, row in enumerate(rows) if row not in drafts]
            rows = [rows[p] for p in positions]
            token_ids = token_ids.index_select(0, self._staging.indices(positions))
        if is_adjusted:
            for feature in self._adjustments:
                feature.observe(rows, token_ids)
        self._draw.observe(rows)

    def _check(self, logits: Tensor, rows: list[int], drafts: Mapping[int, Sequence[int]]) -> None:
        assert logits.shape == (len(rows), self._vocab_size), f"logits {tuple(logits.shape)}"
        assert logits.dtype in _LOGIT_DTYPES, f"logits are {logits.dtype}"
        if rows is self._known_rows:  # usually a step decodes the same rows as the last one
            return
        distinct = set(rows)
        once = [row for row in rows if row not in drafts]
        assert len(set(once)) == len(once), f"a row without drafts twice in {rows}"
        assert distinct <= self._rows, f"a row never added in {rows}"
        self._known_rows = None if drafts else rows

    def _of_lines(self, behind: Tensor | None, positions: list[int]) -> Tensor | None:
        if behind is None:
            return None
        return behind.index_select(0, self._staging.indices(positions))

    def _choose_adjusted(
        self,
        logits: Tensor,
        rows: list[int],
        positions: list[int],
        ahead: Ahead | None,
        behind: Tensor | None,
    ) -> GreedyChoice:
        """The tokens of the lines at `positions`, whose logits some feature changes; [P]."""
        adjusted_rows, ahead = [rows[p] for p in positions], at(ahead, positions)
        # [P, vocab], always a copy, because the caller's logits must not change.
        work = logits.index_select(0, self._staging.indices(positions)).float()
        for feature in self._adjustments:
            feature.apply(work, adjusted_rows, ahead)
        choice = greedy_choice(work)
        drawn = positions_of(adjusted_rows, self._draw)
        if not drawn:
            return choice
        members = [adjusted_rows[p] for p in drawn]
        its_behind = self._of_lines(behind, [positions[p] for p in drawn])
        part = self._draw.choose(work, drawn, members, at(ahead, drawn), its_behind)
        return self._merge(choice, drawn, part)

    def _merge(
        self, choice: GreedyChoice, positions: list[int], part: GreedyChoice
    ) -> GreedyChoice:
        """`choice` with the lines at `positions` replaced; a non-finite line stays non-finite."""
        index = self._staging.indices(positions)
        is_finite = choice.is_finite.index_copy(0, index, part.is_finite) & choice.is_finite
        token_ids = choice.token_ids.index_copy(0, index, part.token_ids)
        return GreedyChoice(token_ids=token_ids.masked_fill_(~is_finite, 0), is_finite=is_finite)
