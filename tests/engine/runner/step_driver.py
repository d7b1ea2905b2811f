"""Drives an `Executor` by hand: admits rows on scattered blocks and makes plans for them."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv.layout import KvDtype
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM, attention_shape
from engine.plan import RowAdmission, StepPlan, StepResult
from engine.request import SamplingParams
from engine.runner.executor import Executor
from engine.runner.executor_options import DEFAULT_OPTIONS, ExecutorOptions
from engine.sampling.sampled import RowSampler
from engine.sampling.sampler import Sampler
from kernels.attention.names import AttentionNames
from kernels.attention.phased import Phases
from kernels.attention.select import build_attention
from kernels.kv.scales import KvScales

AUTO = AttentionNames(prefill="auto", decode="auto")
_DTYPES: dict[torch.dtype, KvDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


class StepDriver:
    """Counters a scheduler would keep, for as many rows as a test needs."""

    def __init__(
        self,
        model: CausalLM,
        *,
        seed: int,
        block_size: int = 4,
        num_blocks: int = 128,
        max_rows: int = 8,
        sampler: RowSampler | None = None,
        attention: AttentionNames = AUTO,
        fixed_tile: bool = False,
        phased: Phases | None = None,
        options: ExecutorOptions = DEFAULT_OPTIONS,
        comm: Comm = SINGLE_RANK,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`phased`: computes attention instead of what `attention` names.

        comm: to the other ranks of `model`; each has a driver that does the same. kv_scales: K and
        V are kept as e4m3 numbers of these.
        """
        is_fp8 = kv_scales is not None
        if kv_scales is not None:
            options = replace(options, kv_scales=KvScales.of(kv_scales.to(model.device)))
        dtype = "fp8_e4m3" if is_fp8 else _DTYPES[model.dtype]
        layout = model.spec.kv_layout(block_size=block_size, dtype=dtype)
        self.executor = Executor(
            model,
            layout=layout,
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_model_len=model.spec.max_model_len,
            max_num_batched_tokens=max_rows * model.spec.max_model_len,
            sampler=sampler
            or Sampler(model.spec.vocab_size, max_rows, model.spec.eos_token_ids, model.device),
            attention=phased
            or build_attention(
                attention,
                attention_shape(model.spec),
                block_size=block_size,
                dtype=model.dtype,
                device=model.device,
                fixed_tile=fixed_tile,
                is_fp8=is_fp8,
            ),
            options=options,
            comm=comm,
        )
        self.block_size = block_size
        self.random = random.Random(seed)
        self.free_blocks = list(range(num_blocks))
        self.random.shuffle(self.free_blocks)
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}
        self._admissions: list[RowAdmission] = []
        self._released: list[int] = []
        self._zeroed: list[int] = []
        self._step = 0

    def admit(
        self,
        row: int,
        token_ids: Sequence[int],
        *,
        params: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
        shared_blocks: Sequence[int] = (),
        num_computed: int = 0,
    ) -> None:
        """Enter `row` with the next plan; `shared_blocks` hold its first tokens' KV already."""
        self.tokens[row] = list(token_ids)
        self.blocks[row] = list(shared_blocks)
        self.num_computed[row] = num_computed
        self._admissions.append(
            RowAdmission(
                row=row,
                token_ids=list(token_ids),
                num_prompt_tokens=num_prompt_tokens or len(token_ids),
                params=params,
                block_ids=list(shared_blocks),
                num_computed_tokens=num_computed,
            )
        )

    def release(self, row: int, *, zeroes_blocks: bool = False) -> None:
        """Give `row` and its blocks back with the next plan."""
        self._released.append(row)
        if zeroes_blocks:
            self._zeroed += self.blocks[row]
        self.free_blocks += self.blocks[row]
        self.random.shuffle(self.free_blocks)
        del self.tokens[row], self.blocks[row], self.num_computed[row]

    def plan(self, num_new: dict[int, int], *, samples: bool = False) -> StepPlan:
        """`num_new`: row -> tokens to compute, in plan order.

        With `samples`, rows that reach their last known token sample.
        """
        rows = list(num_new)
        reaches_end = [self.num_computed[r] + num_new[r] == len(self.tokens[r]) for r in rows]
        new_block_ids = []
        for row in rows:
            needed = -(-(self.num_computed[row] + num_new[row]) // self.block_size)
            new = [self.free_blocks.pop() for _ in range(needed - len(self.blocks[row]))]
            self.blocks[row] += new
            new_block_ids.append(new)
        plan = StepPlan(
            step=self._step,
            zero_block_ids=self._zeroed,
            admissions=self._admissions,
            released_rows=self._released,
            rows=rows,
            num_new_tokens=[num_new[r] for r in rows],
            num_computed_tokens=[self.num_computed[r] for r in rows],
            num_samples=[int(samples and ends) for ends in reaches_end],
            new_block_ids=new_block_ids,
        )
        self._admissions, self._released, self._zeroed = [], [], []
        self._step += 1
        for row in rows:
            self.num_computed[row] += num_new[row]
        return plan

    def logits(self, num_new: dict[int, int]) -> dict[int, Tensor]:
        """Run one step without sampling; row -> logits [num_new, vocab]."""
        lines = self.executor.forward_logits(self.plan(num_new), of_all_tokens=True)
        return dict(zip(num_new, torch.split(lines, list(num_new.values())), strict=True))

    def sample(self, num_new: dict[int, int]) -> StepResult:
        """Run one step with sampling; sampled tokens become known."""
        result = self.executor.launch(self.plan(num_new, samples=True)).wait()
        for row, token_ids in zip(num_new, result.tokens, strict=True):
            self.tokens[row] += token_ids
        return result

    def logits_in_chunks(self, row: int, chunk: int) -> Tensor:
        """All logits of one row computed alone, `chunk` tokens a step, [T, vocab]."""
        lines = []
        while (left := len(self.tokens[row]) - self.num_computed[row]) > 0:
            lines.append(self.logits({row: min(chunk, left)})[row])
        return torch.cat(lines)
