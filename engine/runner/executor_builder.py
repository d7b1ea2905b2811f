"""Builds a warmed-up executor on its device: weights, attention, KV memory, graphs.

Does not know what runs on the executor or when.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import AppConfig
from engine.errors import ConfigError
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import SINGLE_RANK, Comm
from engine.layers.moe import Mixture
from engine.model_folder import DTYPES, compute_dtype
from engine.models.kv_scales import scales_of_rank
from engine.models.llama import CausalLM, attention_shape
from engine.models.registry import WeightSource, build_model
from engine.models.spec import ModelSpec
from engine.ranks.agreement import meet
from engine.ranks.rank import WHOLE_MODEL
from engine.runner.auto import CPU_BLOCKS, StepSizes
from engine.runner.calibration import Room
from engine.runner.captured_sizes import build_prompt_sizes, build_verify_sizes, replays_graphs
from engine.runner.executor import Executor
from engine.runner.executor_options import ExecutorOptions
from engine.runner.expert_load import ExpertLoads
from engine.runner.exports import ExportKeeper
from engine.runner.graphs import CudaRecorder, Recorder
from engine.runner.kv_memory import held_again, num_blocks_that_fit
from engine.runner.overlap.rule import build_rule, layer_costs
from engine.runner.overlap.trials import MIN_DECODE_ROWS, OverlapTrials
from engine.runner.warm_up import warm_up
from engine.sampling.constraint import Matchers
from engine.sampling.embeddings import Embeddings
from engine.sampling.sampled import RowSampler
from engine.sampling.sampler import Sampler
from kernels.attention.masks import load_mask_function
from kernels.attention.names import AttentionNames, BackendUnavailable
from kernels.attention.phased import Phases
from kernels.attention.select import build_attention
from kernels.attention.select_verify import add_verification
from kernels.comm.limits import sequence_parallel_tokens
from kernels.device import device_properties
from kernels.kv.scales import KvScales

logger = logging.getLogger(__name__)

# From an executor's store to what becomes of the model's exports in its steps.
KeepExports = Callable[[KvStore], ExportKeeper]


class ExecutorBuilder:
    """Builds the executor of `config`, for a trial or for use."""

    def __init__(
        self,
        config: AppConfig,
        *,
        spec: ModelSpec,
        layout: KvLayout,
        sizes: StepSizes,
        model: CausalLM | None = None,
        matchers: Matchers | None = None,
        sends_blocks: bool = False,
        num_staged: int = 0,
        comm: Comm = SINGLE_RANK,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`spec`, `layout`: of the part of this rank. `sizes`: of the largest steps, on all ranks.

        `model`: built before from an equal model section; None = load its weights here.
        `matchers`: for rows with a constraint; None = no row may have one. `sends_blocks`: as of
        `ExecutorOptions`. `num_staged`: as of `num_blocks_that_fit`. `kv_scales`: fp32 [layers, 2,
        KV heads of all ranks] for a layout of e4m3 numbers. Raises ConfigError if model, backend
        and device do not go together.
        """
        self._config = config
        self._spec = spec
        self._layout = layout
        self._sizes = sizes
        self._matchers = matchers
        self._sends_blocks = sends_blocks
        self._num_staged = num_staged
        self._comm = comm
        self._keep_exports: KeepExports | None = None
        self._target: Executor | None = None
        self._blocks: Tensor | None = None
        self._device = torch.device(config.model.device)
        self._dtype = DTYPES[compute_dtype(config.model, spec)]
        self._kv_scales: KvScales | None = None
        if kv_scales is not None:
            own = WHOLE_MODEL if spec.has_dp_attention else comm.rank
            of_rank = scales_of_rank(kv_scales, own)
            before = torch.ones(layout.num_layers_before, *of_rank.shape[1:])  # never read
            of_rank = torch.cat((before, of_rank))
            self._kv_scales = KvScales.of(of_rank.to(self._device))
        asked = config.model.max_model_len
        self._max_model_len = spec.max_model_len if asked is None else asked
        attention = self._build_attention()  # before loading, so that errors come early
        self._uses_graphs = replays_graphs(config, attention)
        self._prompt_sizes = build_prompt_sizes(
            config.laps,
            sizes,
            attention,
            uses_graphs=self._uses_graphs,
            is_latent=spec.latent is not None,
            has_dp_attention=spec.has_dp_attention,
        )
        self._verify_sizes = build_verify_sizes(
            config.speculation, sizes, attention, uses_graphs=self._uses_graphs
        )
        self._model = self._load_model() if model is None else model
        self._round_expert_inputs()
        self._expert_loads = self._count_experts()

    @property
    def model(self) -> CausalLM:
        return self._model

    def keep_exports(self, keep: KeepExports) -> None:
        """What executors built from now on do with what the model exports."""
        self._keep_exports = keep

    def draft_for(self, target: Executor) -> None:
        """Executors built from now on draft for `target`."""
        self._target = target

    def store_in(self, blocks: Tensor) -> None:
        """Executors built from now on keep K and V in this memory, [num_blocks, *block_shape]."""
        self._blocks = blocks

    def build_executor(self) -> Executor:
        """A warmed-up, captured executor with the configured number of blocks, or all that fit."""
        meet(self._comm)  # not all load their weights in the same time
        num_blocks = self._config.cache.num_blocks
        if num_blocks is None:
            num_blocks = self._num_blocks_that_fit() if self._is_gpu else CPU_BLOCKS
        executor = self._build(num_blocks)
        if self._overlaps:
            self._measure_overlap(executor)
        return executor

    @property
    def graph_token_sizes(self) -> tuple[int, ...]:
        """Sizes in tokens of prompt steps without padding, ascending; () = no size is preferred."""
        return () if self._prompt_sizes is None else self._prompt_sizes.graph_token_sizes

    @property
    def verify_token_sizes(self) -> tuple[int, ...]:
        """Sizes in tokens that steps with drafts are padded to, ascending; () = none is."""
        return tuple(size.num_tokens for size in self._verify_sizes)

    @property
    def max_row_tokens(self) -> int:
        """Tokens of a prompt, at most: one more is sampled."""
        return self._max_model_len - 1

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _num_blocks_that_fit(self) -> int:
        sizes, layout = self._sizes, self._layout
        # Enough for the largest step plus a block for every row.
        trial_blocks = layout.num_blocks_for(sizes.max_tokens) + sizes.max_rows

        def run_trial() -> None:
            self._build(trial_blocks)

        return num_blocks_that_fit(
            run_trial,
            trial_blocks=trial_blocks,
            block_bytes=layout.block_bytes,
            share=self._config.cache.gpu_memory_utilization,
            num_staged=self._num_staged,
            comm=self._comm,
        )

    def _build(self, num_blocks: int) -> Executor:
        sizes = self._sizes
        attention = self._build_attention()
        try:
            attention.prepare(
                max_rows=sizes.max_rows,
                max_row_tokens=min(sizes.max_tokens, self.max_row_tokens),
                max_row_keys=self._max_model_len,
            )
        except BackendUnavailable as error:
            raise ConfigError(f"model.attention: {error}") from error
        executor = Executor(
            self._model,
            layout=self._layout,
            num_blocks=num_blocks,
            max_rows=sizes.max_rows,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=sizes.max_tokens,
            sampler=self._build_sampler(sizes.max_rows),
            attention=attention,
            options=self._options(),
            comm=self._comm,
        )
        if self._keep_exports is not None:
            executor.keep_exports(self._keep_exports(executor.kv_store))
        if self._target is not None:
            executor.draft_for(self._target)
        if self._overlaps:
            self._overlap_two_batches(executor)
        self._warm_up(executor, attention)
        given_back = held_again(self._device)
        recorder = None
        if self._uses_graphs:
            recorder = CudaRecorder(has_watchdog=self._comm.rank.size > 1)
            executor.capture_graphs(
                recorder, logger.info, prompts=self._prompt_sizes, verify=self._verify_sizes
            )
        if self._overlaps:
            self._lag_and_capture(executor, recorder)
        del given_back
        executor.expert_loads = self._expert_loads
        return executor

    def _warm_up(self, executor: Executor, attention: Phases) -> None:
        """Run each kind of step once, beside as much memory as attention takes in the largest."""
        sizes, num_blocks = self._sizes, executor.kv_store.num_blocks
        num_bytes = attention.working_bytes(
            max_tokens=sizes.max_tokens, max_rows=sizes.max_rows, max_row_keys=self._max_model_len
        )
        # Freed for steps to use: a trial that has run them counts it as taken.
        working_memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        warm_up(
            executor,
            num_rows=sizes.max_rows,
            num_blocks=num_blocks,
            max_tokens=min(sizes.max_tokens, num_blocks * self._layout.block_size),
            max_row_tokens=self.max_row_tokens,
        )
        del working_memory

    @property
    def _overlaps(self) -> bool:
        return self._config.execution.enable_two_batch_overlap and self._comm.rank.size > 1

    def _options(self) -> ExecutorOptions:
        """Raises ConfigError for a second stream where no step replays a graph."""
        config = self._config
        second_stream_tokens = config.execution.dual_stream_token_threshold
        if second_stream_tokens and not self._uses_graphs:
            raise ConfigError(
                "execution.dual_stream_token_threshold: only steps that replay graphs use a second"
                " stream, and here none does; set it to 0"
            )
        drafts = config.speculation
        return ExecutorOptions(
            sends_blocks=self._sends_blocks,
            kv_scales=self._kv_scales,
            max_drafts=0 if drafts.drafter == "none" else drafts.max_drafts,
            min_exchanged_tokens=self._min_exchanged_tokens(),
            sums_in_order=config.model.deterministic,
            second_stream_tokens=second_stream_tokens,
            blocks=self._blocks,
        )

    def _min_exchanged_tokens(self) -> int | None:
        """As of `ExecutorOptions`. Raises ConfigError for a key that is not for this model."""
        workers, spec = self._config.workers, self._spec
        asked = workers.sequence_parallel_min_tokens
        if isinstance(asked, int) and spec.mixture is not None:
            raise ConfigError(
                "workers.sequence_parallel_min_tokens: the model has experts; leave it out, or set"
                " expert_parallel and expert_exchange_min_tokens"
            )
        if spec.mixture is not None:
            asked = workers.expert_exchange_min_tokens
        elif asked == "auto":
            asked = self._auto_sequence_parallel()
        return asked if self._model.can_exchange and self._comm.rank.size > 1 else None

    def _auto_sequence_parallel(self) -> int | None:
        """None where nobody has measured it."""
        num_ranks = self._comm.rank.size
        if self._device.type == "cpu" or num_ranks == 1:
            return None
        if self._overlaps or self._spec.quantization is not None:
            return None
        if self._comm.fused_sums is None:  # without peer memory, through NCCL alone
            return None
        row_bytes = self._spec.hidden_size * self._dtype.itemsize
        found = sequence_parallel_tokens(device_properties(self._device).name, num_ranks, row_bytes)
        if found is not None:
            logger.info("steps of %d tokens or more are sequence-parallel, as measured", found)
        return found

    def _round_expert_inputs(self) -> None:
        from_tokens = self._config.execution.round_expert_inputs_from
        if from_tokens is not None and self._spec.mixture is None:
            raise ConfigError(
                "execution.round_expert_inputs_from: the model has no experts; leave it out"
            )
        for layer in self._model.layers:
            if isinstance(layer.mlp, Mixture):
                layer.mlp.round_inputs(from_tokens)

    def _count_experts(self) -> ExpertLoads | None:
        read_every = self._config.execution.expert_load_steps
        if read_every == 0 or self._spec.mixture is None:
            return None
        return ExpertLoads(self._model, read_every=read_every, num_ranks=self._comm.rank.size)

    def _overlap_two_batches(self, executor: Executor) -> None:
        execution, num_ranks = self._config.execution, self._comm.rank.size
        layer = layer_costs(self._spec, num_ranks, self._dtype.itemsize)
        rule = build_rule(execution, layer, device_properties(self._device))
        executor.overlap_two_batches(rule, threshold=execution.tbo_token_distribution_threshold)

    def _lag_and_capture(self, executor: Executor, recorder: Recorder | None) -> None:
        """What split decode steps need before the first. recorder: of the whole ones, if any."""
        asked = self._config.execution.tbo_min_decode_rows
        if asked is None:
            return
        capture: Callable[[int], None] | None = None
        if recorder is not None:
            graphs = recorder

            def capture(min_rows: int) -> None:
                executor.capture_split_decodes(graphs, logger.info, min_rows=min_rows)

        if asked == "measured":
            lag = self._overlap_trials(executor).decode_lag(capture)
            if lag is not None:
                executor.two_batches.lag_by(lag)
        if recorder is not None:
            least = MIN_DECODE_ROWS if asked == "measured" else asked
            executor.capture_split_decodes(recorder, logger.info, min_rows=least)
            executor.capture_split_verification(recorder, logger.info, min_tokens=least)

    def _measure_overlap(self, executor: Executor) -> None:
        """Find the thresholds that the configuration leaves to measurement."""
        execution, rule = self._config.execution, executor.two_batches.rule
        trials = self._overlap_trials(executor)
        if execution.tbo_min_prompt_tokens == "measured":
            prompts = self._prompt_sizes
            largest_graph = 0 if prompts is None else prompts.sizes[-1].num_tokens
            rule = replace(rule, min_prompt_tokens=trials.min_prompt_tokens(largest_graph))
        if execution.tbo_min_decode_rows == "measured":
            rule = replace(rule, min_decode_rows=trials.min_decode_rows())
        executor.two_batches.rule = rule

    def _overlap_trials(self, executor: Executor) -> OverlapTrials:
        num_blocks, block_size = executor.kv_store.num_blocks, self._layout.block_size
        room = Room(self._sizes, block_size, num_blocks, self.max_row_tokens)
        return OverlapTrials(executor, room, self._comm, logger.info)

    def _build_sampler(self, max_rows: int) -> RowSampler:
        spec = self._spec
        if spec.pooling is not None:
            return Embeddings(is_normalised=spec.pooling.is_normalised)
        return Sampler(spec.vocab_size, max_rows, spec.eos_token_ids, self._device, self._matchers)

    def _load_model(self) -> CausalLM:
        model = self._config.model
        return build_model(
            Path(model.path),
            dtype=self._dtype,
            device=self._device,
            max_model_len=self._max_model_len,
            source=WeightSource(
                is_random=model.weights == "random",
                quantization=model.quantization,
                sharing=self._config.workers.expert_sharing_of(self._comm.rank.size),
            ),
            is_deterministic=model.deterministic,
            rank=self._comm.rank,
        )

    def _build_attention(self) -> Phases:
        """Raises ConfigError if a backend is missing or does not support this model."""
        names, spec = self._config.model.attention, self._spec
        asked = self._config.speculation
        chosen = AttentionNames(prefill=names.prefill, decode=names.decode)
        given: dict[str, Any] = {
            "block_size": self._layout.block_size,
            "dtype": self._dtype,
            "device": self._device,
            "fixed_tile": self._config.model.deterministic,
        }
        try:
            mask = (
                None if names.mask is None else load_mask_function(names.mask, self._max_model_len)
            )
            shape = attention_shape(
                spec,
                mask,
                num_layers_before=self._layout.num_layers_before,
                num_layers_behind=self._layout.num_layers_behind,
            )
            is_fp8 = self._layout.dtype == "fp8_e4m3"
            phases = build_attention(chosen, shape, is_fp8=is_fp8, **given)
            if asked.attention_backend == "decode":
                num_queries = 1 + asked.max_drafts
                add_verification(
                    phases, chosen, shape, max_queries=num_queries, is_fp8=is_fp8, **given
                )
            return phases
        except BackendUnavailable as error:
            raise ConfigError(f"model.attention: {error}") from error
