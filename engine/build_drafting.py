"""Builds what drafts for one worker's requests: n-grams, a smaller model, or a head of the model.

A model or a head drafts on an executor of its own, with as many blocks as the target's. With DP
attention it has books for each rank, whose passes are launched together; of a head with experts the
ranks share these, and all else of what drafts is whole on each rank.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from configs.schema import AppConfig, SpeculationConfig, WorkersConfig
from engine.clock import Clock
from engine.constraints.grammars import Grammars
from engine.core import DraftingExecutor
from engine.errors import ConfigError
from engine.kv.features import FeaturePlanes
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import Role
from engine.model_folder import DTYPES, drafter_folder, load_scales, rank_layout
from engine.models.eagle3 import build_eagle3, read_eagle3
from engine.models.feature_head import FeatureHead
from engine.models.llama import CausalLM
from engine.models.mtp import build_mtp
from engine.models.registry import build_ops
from engine.models.spec import ModelSpec, load_spec
from engine.ranks.shared_stores import part_of
from engine.runner.executor_builder import ExecutorBuilder
from engine.runner.exports import NextFeatures, TokenFeatures
from engine.runner.measured_executor import MeasuredExecutor
from engine.runner.prompt_passes import PromptPasses
from engine.runner.warm_up import warm_up_ahead
from engine.scheduling.drafter_prompts import DrafterPrompts
from engine.scheduling.drafting import DraftCounts, Drafting
from engine.speculation.controller import SpeculationController
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter, DraftPolicy, FixedDrafts, RequestNgrams
from engine.speculation.feature_drafter import FeatureDrafter
from engine.speculation.ngram import NgramRules
from engine.speculation.rank_passes import JoinedPasses, OwnPasses
from engine.speculation.rules import DEFAULT_RULES

logger = logging.getLogger(__name__)
_MAX_TEXT_BYTES = 2**28  # of the texts in which drafts are looked up: not part of what is measured
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def build_head(
    config: AppConfig, target: ModelSpec, builder: ExecutorBuilder, comm: Comm
) -> FeatureHead | None:
    """This rank's part of the head, if one drafts; from now on steps keep what it reads.

    target: of the whole model.
    """
    folder, model, rank = drafter_folder(config), builder.model, comm.rank
    own = SINGLE_RANK if target.has_dp_attention else comm
    ops, is_deterministic = build_ops(model.device), config.model.deterministic
    match config.speculation.drafter:
        case "eagle3":
            head = build_eagle3(
                folder,
                read_eagle3(folder, target),
                model.embedding,
                dtype=model.dtype,
                ops=ops,
                max_model_len=model.rotary.max_tokens,
                is_deterministic=is_deterministic,
                rank=own.rank,
            )
        case "mtp":
            head = build_mtp(
                folder, model, target, ops, is_deterministic=is_deterministic, rank=rank
            )
        case _:
            model.export(None)
            return None
    model.export(head.export)
    builder.keep_exports(lambda store: TokenFeatures(_planes(store, head, target, model, own)))
    return head


def _planes(
    store: KvStore, head: FeatureHead, target: ModelSpec, model: CausalLM, comm: Comm
) -> FeaturePlanes:
    """target: of the whole model, of which `model` is this rank's part; store: of this rank.

    comm: to the ranks with other heads of it.
    """
    whole = target.kv_layout(block_size=store.layout.block_size, dtype=store.layout.dtype)
    return FeaturePlanes(store, head.width, model.dtype, part=part_of(comm.rank, whole), comm=comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrafting:
    """What drafts for the requests of one worker."""

    of_rank: list[Drafting]  # of each rank with requests of its own; of ranks that share all, one
    passes: DraftModel | JoinedPasses | None  # what a model or head computes; None = none drafts

    def launch_queued(self) -> None:
        """Launch the passes that ranks with requests of their own have queued for all of them."""
        if isinstance(self.passes, JoinedPasses):
            self.passes.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What drafts are for."""

    config: AppConfig
    spec: ModelSpec  # of the whole model
    measured: MeasuredExecutor
    grammars: Grammars
    comm: Comm
    holds: bool

    @property
    def num_own(self) -> int:
        """Ranks with requests of their own; 1 = they share all."""
        return self.comm.rank.size if self.spec.has_dp_attention else 1

    def comm_of(self, drafting: ModelSpec) -> Comm:
        """To the ranks that share what drafts; each of DP attention has all of it but experts."""
        is_whole = self.spec.has_dp_attention and not drafting.has_dp_attention
        return SINGLE_RANK if is_whole else self.comm


def build_drafting(
    config: AppConfig,
    spec: ModelSpec,
    measured: MeasuredExecutor,
    grammars: Grammars,
    clock: Clock,
    comm: Comm,
    *,
    role: Role,
    holds: bool,
) -> RankDrafting:
    """The drafts of one worker's requests; none unless the configuration names a drafter.

    holds: as of `Drafting`. comm: to the ranks that launch the same plans. A prefill worker whose
    blocks have room for a draft model's K and V computes these, and drafts nothing itself.
    """
    asked = config.speculation
    target = _Target(
        config=config, spec=spec, measured=measured, grammars=grammars, comm=comm, holds=holds
    )
    if asked.drafter == "none":
        return RankDrafting(
            of_rank=[Drafting(None, None, holds=holds)] * target.num_own, passes=None
        )
    policy, counts = build_policy(asked), DraftCounts()
    if role == "prefill" and measured.executor.layout.drafter is not None:
        return _build_prompt_passes(target, policy)

    def drafting(drafter: Drafter) -> Drafting:
        sizes = measured.verify_token_sizes
        return Drafting(drafter, policy, holds=holds, graph_tokens=sizes, counts=counts)

    if asked.drafter == "ngram":
        return RankDrafting(of_rank=[drafting(_build_ngrams(target))] * target.num_own, passes=None)
    executor, build = (
        _build_feature_drafter(target) if measured.head else _build_draft_model(target)
    )
    if target.num_own == 1:
        drafter = build(executor, clock)
        return RankDrafting(of_rank=[drafting(drafter)], passes=drafter)
    passes = JoinedPasses(executor, target.num_own)
    return RankDrafting(
        of_rank=[drafting(build(own, clock)) for own in passes.of_rank], passes=passes
    )


def _build_ngrams(target: _Target) -> RequestNgrams:
    rules = NgramRules(max_corpus_tokens=target.config.speculation.max_corpus_tokens)
    on_device = _looks_up_ngrams(target, rules)
    if on_device:
        executor, sizes = target.measured.executor, target.measured.sizes
        executor.look_up_drafts(rules)
        warm_up_ahead(
            executor,
            num_rows=sizes.max_rows,
            max_tokens=sizes.max_tokens,
            max_row_tokens=executor.max_row_tokens,
        )
    return RequestNgrams(rules, on_device=on_device)


def _looks_up_ngrams(target: _Target, rules: NgramRules) -> bool:
    """Raises ConfigError where it is asked for and impossible."""
    asked, executor = target.config.speculation.ngrams_on_device, target.measured.executor
    if not asked:
        return False
    why = None
    if not target.holds:
        why = "steps do not overlap; set scheduler.overlap to true"
    elif not executor.can_plan_ahead:
        why = (
            "the attention plans by lengths that the host knows; set speculation.attention_backend"
            " to decode and model.attention.decode to triton"
        )
    if why is not None and asked is True:
        raise ConfigError(f"speculation.ngrams_on_device: {why}, or set auto")
    num_bytes = executor.bytes_to_look_up_drafts(rules)
    if why is None and asked == "auto" and num_bytes > _MAX_TEXT_BYTES:
        why = f"the texts of all rows would take {num_bytes / 2**20:.0f} MiB"
    if why is not None:
        logger.info("drafts are looked up on the host: %s", why)
    return why is None


# From what launches one rank's passes, and a clock.
_BuildDrafter = Callable[[DraftingExecutor, Clock], DraftModel]


def _build_draft_model(target: _Target) -> tuple[DraftingExecutor, _BuildDrafter]:
    """An executor like the target's over the smaller model, with as many blocks."""
    builder, spec = _draft_model_builder(target)
    return _build_passes(target, builder, spec, DraftModel)


def _draft_model_builder(target: _Target) -> tuple[ExecutorBuilder, ModelSpec]:
    """Also returns what the whole draft model is. Its K and V go into the target's blocks, if these
    have room for them.
    """
    path = target.config.speculation.model_path
    assert path is not None, "draft_model has one"
    own, spec = load_spec(Path(path)), target.spec
    if own.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"speculation.model_path: {path} has {own.vocab_size} tokens and the model"
            f" {spec.vocab_size}; drafts need a model of the same vocabulary"
        )
    store = target.measured.executor.kv_store
    if store.layout.drafter is not None:
        layout = store.layout.of_drafter
        builder = _drafting_builder(target, path, own, None, layout)
        builder.store_in(store.tensor.view(store.num_blocks, *layout.block_shape))
        return builder, own
    if target.config.moves_draft_kv:
        logger.info(
            "decode workers compute the draft model's K and V of prompts: these do not move, being"
            " beside latents, or of other heads than the model's where ranks share these"
        )
    return _drafting_builder(target, path, own, None), own


def _build_prompt_passes(target: _Target, policy: DraftPolicy) -> RankDrafting:
    """Steps of the target compute a draft model's K and V of prompts, too; nothing is drafted."""
    builder, _ = _draft_model_builder(target)
    executor = target.measured.executor
    executor.compute_prompts_with(PromptPasses(builder.build_executor()))
    of_rank = [
        Drafting(
            None,
            None,
            holds=target.holds,
            prompts=DrafterPrompts(
                policy,
                num_blocks=executor.kv_store.num_blocks,
                block_size=target.config.cache.block_size,
                max_model_len=builder.max_row_tokens,
            ),
        )
        for _ in range(target.num_own)
    ]
    return RankDrafting(of_rank=of_rank, passes=None)


def _build_feature_drafter(target: _Target) -> tuple[DraftingExecutor, _BuildDrafter]:
    """An executor over the head, which reads and writes vectors in the target's store."""
    head, executor = target.measured.head, target.measured.executor
    assert head is not None, "built with the target"
    own = SINGLE_RANK if target.spec.has_dp_attention else target.comm
    planes = _planes(executor.kv_store, head, target.spec, executor.model, own)
    head.read_from(planes)
    builder = _drafting_builder(target, str(drafter_folder(target.config)), head.spec, head.model)
    builder.keep_exports(lambda _: NextFeatures(planes, target.config.cache.block_size))
    return _build_passes(target, builder, head.spec, FeatureDrafter)


def _build_passes(
    target: _Target, builder: ExecutorBuilder, spec: ModelSpec, kind: type[DraftModel]
) -> tuple[DraftingExecutor, _BuildDrafter]:
    """What runs all ranks' passes, and what builds the books of one rank's."""
    measured = target.measured
    if target.holds and measured.executor.can_plan_ahead:
        builder.draft_for(measured.executor)  # drafts stay on the device
    executor = builder.build_executor()
    can_propose_ahead = executor.guesses is not None and executor.can_plan_ahead

    def build(passes: DraftingExecutor, clock: Clock) -> DraftModel:
        return kind(
            passes,
            num_blocks=measured.executor.kv_store.num_blocks,
            block_size=target.config.cache.block_size,
            max_model_len=builder.max_row_tokens,
            max_tokens=measured.sizes.max_tokens,
            now_s=clock.now_s,
            can_propose_ahead=can_propose_ahead,
        )

    if target.num_own > 1 and not spec.has_dp_attention:
        return OwnPasses(executor, target.comm.rank.index), build
    return executor, build


def _drafting_builder(
    target: _Target,
    path: str,
    spec: ModelSpec,
    model: CausalLM | None,
    layout: KvLayout | None = None,
) -> ExecutorBuilder:
    """Like the target's, with as many blocks, for another model.

    spec: of the whole model; model: the rank's part, None = load it. A model that is given is a
    head, whose K and V have no scales: they stay as they are computed. layout: of the rank's
    blocks; None = blocks of this model's alone.
    """
    config, executor, comm = target.config, target.measured.executor, target.comm_of(spec)
    length = model.rotary.max_tokens if model is not None else None
    own = msgspec.structs.replace(
        config.model,
        path=path,
        max_model_len=length,
        dtype=_NAMES[executor.model.dtype],
        weights="safetensors",
        quantization="auto",
    )
    num_blocks = executor.kv_store.num_blocks
    replaced = msgspec.structs.replace(
        config,
        model=own,
        cache=msgspec.structs.replace(
            config.cache,
            num_blocks=num_blocks,
            kv_scales=None,
            kv_dtype=config.cache.kv_dtype if model is None else "auto",
        ),
        execution=msgspec.structs.replace(
            config.execution,
            expert_load_steps=0,
            dual_stream_token_threshold=0,
            enable_two_batch_overlap=False,
            round_expert_inputs_from=None,
        ),
        speculation=_attending_as(config.speculation) if spec.latent else SpeculationConfig(),
    )
    if model is None:  # whatever the target's experts are
        workers = _without_experts(config.workers)
        replaced = msgspec.structs.replace(replaced, workers=workers)
    kv_scales = load_scales(replaced, spec)
    return ExecutorBuilder(
        replaced,
        spec=spec.of_rank(comm.rank),
        layout=layout or rank_layout(replaced, spec, comm.rank, kv_scales),
        sizes=target.measured.sizes,
        model=model,
        matchers=target.grammars,
        comm=comm,
        kv_scales=kv_scales,
    )


def _without_experts(workers: WorkersConfig) -> WorkersConfig:
    return msgspec.structs.replace(
        workers,
        expert_parallel=False,
        enable_dp_attention=False,
        expert_exchange_min_tokens=None,
        sequence_parallel_min_tokens=None,
    )


def _attending_as(target: SpeculationConfig) -> SpeculationConfig:
    """Of a model that drafts: as many tokens of a row as the target's by the same backend.

    Only of latent attention, whose backend of prompts needs true lengths on the host.
    """
    return SpeculationConfig(
        attention_backend=target.attention_backend, max_drafts=target.max_drafts
    )


def build_policy(asked: SpeculationConfig) -> DraftPolicy:
    if not asked.adaptive:
        return FixedDrafts(asked.max_drafts, max_temperature=asked.max_temperature)
    most = asked.max_drafts
    rules = replace(
        DEFAULT_RULES,
        max_temperature=asked.max_temperature,
        max_drafts=most,
        first_drafts=min(DEFAULT_RULES.first_drafts, most),
        retry_drafts=min(DEFAULT_RULES.retry_drafts, most),
    )
    return SpeculationController(rules)
