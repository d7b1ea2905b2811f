"""Random prompt steps on several executors at once, and stand-ins that capture on a CPU."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.models.llama import CausalLM, attention_shape
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.runner.graphs import GraphOutput
from engine.sampling.sampled import SampledTensors
from engine.sampling.sampler import Sampler
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.sampling.choices import GreedyChoice
from tests.engine.runner.step_driver import GREEDY, StepDriver

# One of each way that a row may sample.
KINDS = (
    GREEDY,
    SamplingParams(max_tokens=64, temperature=1.3, seed=8, ignore_eos=True),
    SamplingParams(max_tokens=64, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=64, temperature=0.0, frequency_penalty=1.5, ignore_eos=True),
)


class RerunRecorder:
    """Where there are no graphs: records nothing and computes again, into the same memory."""

    def record(self, run: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        run()  # like a warm-up, over whatever the buffers hold
        return run

    def free_bytes(self) -> int:
        return 0


class RowTensorAttention:
    """A `GraphAttention` in plain torch that believes nothing but the rows' tensors.

    token i of a row sees keys j <= num_keys - num_new + i; what sees no key becomes NaN, so that
    whoever reads it shows.
    """

    can_capture_prompts = True
    reads_lengths_on_device = True

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, step: AttentionStep) -> RowTensors:
        return step.device_rows

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> RowTensors:
        return rows

    def begin(self, metadata: RowTensors) -> None:
        pass

    def refresh(self, metadata: RowTensors, step: AttentionStep) -> None:
        pass

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: RowTensors,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: object = None,
    ) -> Tensor:
        assert sinks is None, "knows none"
        assert scales is None, "knows none"
        attended = torch.full(q.shape, torch.nan, dtype=q.dtype)
        bounds = metadata.cu_tokens.tolist()
        for row, num_keys in enumerate(metadata.num_keys.tolist()):
            tokens = slice(bounds[row], bounds[row + 1])
            if num_keys:
                attended[tokens] = self._row(q[tokens], store[:, layer], metadata, row, num_keys)
        flat = attended.flatten(1)
        return flat if out is None else out.copy_(flat)

    def _row(
        self, q: Tensor, layer_store: Tensor, rows: RowTensors, row: int, num_keys: int
    ) -> Tensor:
        """q: [N, heads, head_dim]; NaN where a token sees nothing."""
        blocks = rows.block_ids[int(rows.cu_blocks[row]) : int(rows.cu_blocks[row + 1])].long()
        # [2, blocks * block_size, kv_heads, head_dim]
        kept = layer_store[blocks].transpose(0, 1).flatten(1, 2)[:, :num_keys]
        keys, values = kept.repeat_interleave(self._shape.num_groups, 2)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._shape.scale
        positions = torch.arange(num_keys - len(q), num_keys)
        is_seen = torch.arange(num_keys) <= positions[:, None]
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def row_tensor_attention(model: CausalLM) -> PhasedAttention:
    """For models without windows."""
    spec = model.spec
    both = RowTensorAttention(attention_shape(spec))
    return PhasedAttention(prefill=both, decode=both, graph=both, prompt_graph=both)


class LogitSampler(Sampler):
    """The real sampler; remembers the last step's logits by row."""

    def __init__(self, model: CausalLM, max_rows: int) -> None:
        super().__init__(model.spec.vocab_size, max_rows, (), model.device)
        self.logits: dict[int, Tensor] = {}

    def is_plain(self, rows: list[int]) -> bool:
        return False  # else it is given no logits

    def sample(
        self, logits: Tensor, rows: list[int], greedy: GreedyChoice | None = None
    ) -> SampledTensors:
        lines = logits.float().cpu().unbind()
        self.logits = dict(zip(rows, lines, strict=True))
        return super().sample(logits, rows, greedy)


def tell(
    drivers: Sequence[StepDriver],
    rng: random.Random,
    *,
    num_steps: int,
    lengths: Sequence[int],
    decodes: bool,
    check: Callable[[dict[int, int], list[StepResult]], None],
) -> None:
    """The same random steps on every driver; `check(new tokens by row, each driver's result)`.

    Prompts of `lengths` come, are computed in pieces, single tokens among them, and go once they
    are whole; with `decodes` they stay a while and compute a token a step.
    """
    max_outputs = 4 if decodes else 1
    outputs: dict[int, int] = {}
    for _ in range(num_steps):
        free = [row for row in range(8) if row not in outputs]
        for row in free[: rng.randrange(len(free) + 1)]:
            prompt = [rng.randrange(3, 100) for _ in range(rng.choice(lengths))]
            for driver in drivers:
                driver.admit(row, prompt)
            outputs[row] = 0
        chosen = [row for row in outputs if rng.random() < 0.8]
        rng.shuffle(chosen)
        num_new = {row: _draw_new(drivers[0], row, rng) for row in chosen}
        results = [driver.sample(num_new) for driver in drivers]
        check(num_new, results)
        for row, tokens in zip(num_new, results[0].tokens, strict=True):
            outputs[row] += len(tokens)
            if outputs[row] >= max_outputs:
                del outputs[row]
                for driver in drivers:
                    driver.release(row)


def decode_ahead(driver: StepDriver, rng: random.Random) -> list[list[list[int]]]:
    """Sampled ids by step; each step is launched before the one in front of it is waited for."""
    pending, results = [], []
    for step in range(30):
        if step % 11 == 7:
            driver.release(rng.choice(list(driver.tokens)))
        while len(driver.tokens) < (5 if step < 12 else 3):
            row = next(row for row in range(8) if row not in driver.tokens)
            prompt = [rng.randrange(3, 100) for _ in range(rng.randrange(1, 12))]
            driver.admit(row, prompt, params=rng.choice(KINDS if step < 20 else (GREEDY,)))
        num_new = {
            row: len(known) - driver.num_computed[row] for row, known in driver.tokens.items()
        }
        pending.append(driver.executor.launch(driver.plan(num_new, samples=True)))
        for known in driver.tokens.values():
            known.append(-1)  # counted as known; its id is not
        if len(pending) > 1:
            results.append(pending.pop(0).wait().tokens)
    return [*results, pending.pop().wait().tokens]


def _draw_new(driver: StepDriver, row: int, rng: random.Random) -> int:
    left = len(driver.tokens[row]) - driver.num_computed[row]
    return min(left, rng.choice((1, left, rng.randrange(1, left + 1))))
