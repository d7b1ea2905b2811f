"""From logits to the next token of every row, with its log-probabilities.

Knows logits, rows and sampling parameters; nothing of models, blocks, stop conditions or text. All
randomness is `kernels.sample`: no generator, no state besides each row's own history.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.bias import LogitBias, MinTokens
from engine.sampling.feature import LogitFeature, positions_of, put, take
from engine.sampling.logprobs import Logprobs
from engine.sampling.noise import GumbelNoise
from engine.sampling.penalties import OccurrencePenalty, RepetitionPenalty
from engine.sampling.truncation import MinP, Temperature, TopK, TopP
from engine.scheduling.plan import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """What was drawn, in the order of the rows that were asked for."""

    token_ids: list[int]  # [S] 0 where not finite, not to be used
    logprobs: list[TokenLogprobs | None]  # [S] None unless asked for and finite
    is_finite: list[bool]  # [S] False = nothing could be drawn, history unchanged


class Sampler:
    """Draws the next token of each row. In this order, on fp32 logits:

    1. logit_bias          added to the named tokens, before everything else as in vLLM. A bias of
                           +-100 forces or excludes by sheer size, as OpenAI documents; it is
                           finite, so it can be outweighed by logits further apart than that.
    2. repetition_penalty  p > 1 discourages tokens of prompt and output: positive logits / p,
                           negative * p (Hugging Face, vLLM; OpenAI has no such knob).
    3. frequency_penalty,  logit - f * count - p * (count > 0), over output tokens only, never the
       presence_penalty    prompt: OpenAI's formula with vLLM's reading of "the text so far".
    4. min_tokens          eos and stop_token_ids are impossible while fewer output tokens exist
                           (vLLM). With ignore_eos the model's eos ids are not banned, they merely
                           do not stop, which is the scheduler's; stop_token_ids still are.
    5. temperature         0: the argmax of what stands now, lowest id among equals, no noise, and
                           6-9 do not apply. Above 0: divides. However small, it does not turn into
                           another mode (vLLM: below 1e-5 is greedy): 1e-6 draws the best token,
                           and draws among exact equals.
    6. top_k               keeps every logit >= the k-th largest; ties at the k-th all stay, so more
                           than k may. 0, or k >= vocabulary: all (vLLM also says -1; the edge maps
                           it).
    7. top_p               keeps the smallest set of best tokens, of those left and renormalised,
                           with mass >= top_p, at least one; tokens equal to the last all stay.
    8. min_p               keeps tokens with at least min_p times the largest probability, after
                           temperature. Last, as in Hugging Face; vLLM applies it before top_k and
                           top_p, which can differ when min_p and top_p are used together.
    9. noise               argmax(logit + Gumbel(seed, index, token)) is a draw from softmax(logit).
                           index = output tokens so far, across preemption and migration: the same
                           seed continues the same answer whatever else is in the batch. OpenAI
                           promises best effort for `seed`; here only the logits can make it differ.

    logprobs are the model's own: log_softmax of the unprocessed logits, vLLM's default and what
    OpenAI users see at temperature 1. Best first, lower id among equals; tokens at -inf are not
    listed.

    A row is not finite when its logits hold NaN or +inf or nothing above -inf, or when bans and
    penalties left it no finite logit. Other rows are not touched by it.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
    ) -> None:
        assert all(0 <= i < vocab_size for i in eos_token_ids), f"eos ids {eos_token_ids}"
        where = torch.device(device)
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._temperature = Temperature()
        self._adjustments: tuple[LogitFeature, ...] = (  # for greedy rows too
            LogitBias(vocab_size, where),
            RepetitionPenalty(vocab_size, max_rows, where),
            OccurrencePenalty(vocab_size, max_rows, where),
            MinTokens(vocab_size, eos_token_ids, where),
        )
        self._draws: tuple[LogitFeature, ...] = (  # for rows with a temperature
            self._temperature,
            TopK(vocab_size),
            TopP(),
            MinP(),
            GumbelNoise(vocab_size, where),
        )
        self._features = self._adjustments + self._draws
        self._logprobs = Logprobs(vocab_size)
        self._rows: set[int] = set()
        self._shaped_rows: set[int] = set()  # whose logits some feature changes
        self._logprob_rows: set[int] = set()

    @torch.inference_mode()
    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """A request enters `row`, with the output tokens it already has, wherever they were made.

        Drawing for it goes on exactly where whoever drew `output_ids` left off.
        """
        assert 0 <= row < self._max_rows, f"row {row} of {self._max_rows}"
        assert row not in self._rows, f"row {row} is in use"
        self._rows.add(row)
        takers = [f for f in self._features if f.add(row, params, prompt_ids, output_ids)]
        if takers:
            self._shaped_rows.add(row)
        if params.logprobs is not None:
            self._logprobs.add(row, params)
            self._logprob_rows.add(row)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """The request leaves `row`; its history is forgotten."""
        self._rows.remove(row)
        self._shaped_rows.discard(row)
        self._logprob_rows.discard(row)
        self._logprobs.remove(row)
        for feature in self._features:
            feature.remove(row)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[int]) -> SampledBatch:
        """Draw one token for each of `rows`, and advance the history of those that are finite.

        logits: fp32 [S, vocab], one line per row in the same order, left as they are. Rows come in
        any order, each at most once.
        """
        assert logits.shape == (len(rows), self._vocab_size), f"logits {tuple(logits.shape)}"
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        assert len(set(rows)) == len(rows), f"a row twice in {rows}"
        assert self._rows.issuperset(rows), f"a row never added in {rows}"
        # NaN and +inf win a maximum and -inf never does, so one pass finds token and bad rows.
        best, best_ids = logits.max(dim=-1)
        token_ids: list[int] = best_ids.tolist()
        is_finite: list[bool] = best.isfinite().tolist()
        if not self._shaped_rows.isdisjoint(rows):
            self._sample_shaped(logits, rows, token_ids, is_finite)
        if not all(is_finite):
            token_ids = [i if ok else 0 for i, ok in zip(token_ids, is_finite, strict=True)]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if not self._logprob_rows.isdisjoint(rows):
            logprobs = self._logprobs.apply(logits, rows, token_ids, is_finite)
        return SampledBatch(token_ids=token_ids, logprobs=logprobs, is_finite=is_finite)

    def _sample_shaped(
        self, logits: Tensor, rows: list[int], token_ids: list[int], is_finite: list[bool]
    ) -> None:
        """Overwrite the entries of the rows that any feature touches, and advance those rows."""
        positions = [i for i in positions_of(rows, self._shaped_rows) if is_finite[i]]
        if not positions:
            return
        shaped_rows = [rows[i] for i in positions]
        # [P, vocab], always a copy: the caller's logits stay as they are.
        work = logits.index_select(0, torch.tensor(positions, device=logits.device))
        for feature in self._adjustments:
            feature.apply(work, shaped_rows)
        self._add_noise(work, shaped_rows)
        best, best_ids = work.max(dim=-1)
        drawn: list[int] = best_ids.tolist()
        drawn_finite: list[bool] = best.isfinite().tolist()
        for position, token_id, ok in zip(positions, drawn, drawn_finite, strict=True):
            token_ids[position], is_finite[position] = token_id, ok
        advanced = [p for p, ok in enumerate(drawn_finite) if ok]
        for feature in self._features:
            feature.observe([shaped_rows[p] for p in advanced], [drawn[p] for p in advanced])

    def _add_noise(self, work: Tensor, rows: list[int]) -> None:
        """Turn the lines of rows with a temperature into scores whose argmax is a draw."""
        positions = positions_of(rows, self._temperature)
        if not positions:
            return
        part = take(work, positions)
        drawing_rows = [rows[position] for position in positions]
        for feature in self._draws:
            feature.apply(part, drawing_rows)
        put(work, positions, part)
