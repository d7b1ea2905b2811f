"""Builds what drafts for one worker's requests: n-grams, a smaller model, or a head of the model.

A model or a head drafts on an executor of its own, with as many blocks as the target's.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from configs.schema import AppConfig, SpeculationConfig
from engine.clock import Clock
from engine.constraints.grammars import Grammars
from engine.errors import ConfigError
from engine.kv.features import FeaturePlanes
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.model_folder import drafter_folder, load_scales, rank_layout
from engine.models.eagle3 import build_eagle3, read_eagle3
from engine.models.feature_head import FeatureHead
from engine.models.llama import CausalLM
from engine.models.mtp import build_mtp
from engine.models.registry import build_ops
from engine.models.spec import ModelSpec, load_spec
from engine.ranks.shared_stores import part_of
from engine.runner.executor import Executor
from engine.runner.exports import NextFeatures, TokenFeatures
from engine.runner.measured import Measured
from engine.runner.replica import DTYPES, Replica
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import SpeculationController
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter, DraftPolicy, FixedDrafts, RequestNgrams
from engine.speculation.feature_drafter import FeatureDrafter
from engine.speculation.ngram import NgramRules
from engine.speculation.rules import DEFAULT_RULES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def build_head(
    config: AppConfig, target: ModelSpec, replica: Replica, comm: Comm
) -> FeatureHead | None:
    """This rank's part of the head, if one drafts; from now on steps keep what it reads.

    target: of the whole model.
    """
    folder, model, rank = drafter_folder(config), replica.model, comm.rank
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
                rank=rank,
            )
        case "mtp":
            head = build_mtp(
                folder, model, target, ops, is_deterministic=is_deterministic, rank=rank
            )
        case _:
            model.export(None)
            return None
    model.export(head.export)
    given = head, target, model.dtype, comm
    replica.keep_exports(lambda store: TokenFeatures(_planes(store, *given)))
    return head


def _planes(
    store: KvStore, head: FeatureHead, target: ModelSpec, dtype: torch.dtype, comm: Comm
) -> FeaturePlanes:
    """target: of the whole model, which computes in `dtype`; store: of this rank."""
    whole = target.kv_layout(block_size=store.layout.block_size, dtype=store.layout.dtype)
    return FeaturePlanes(store, head.width, dtype, part=part_of(comm.rank, whole), comm=comm)


def build_drafting(
    config: AppConfig,
    spec: ModelSpec,
    measured: Measured,
    grammars: Grammars,
    clock: Clock,
    *,
    holds: bool,
) -> Drafting:
    """The drafts of one worker's requests; none unless the configuration names a drafter.

    holds: as of `Drafting`.
    """
    asked = config.speculation
    drafter: Drafter
    if asked.drafter == "none":
        return Drafting(None, None, holds=holds)
    if measured.head is not None:
        given = config, spec, measured.head, measured, grammars, clock
        drafter = _build_feature_drafter(*given, holds=holds)
    elif asked.model_path is not None:
        others = spec, measured, grammars, clock
        drafter = _build_draft_model(config, asked.model_path, *others, holds=holds)
    else:
        rules = NgramRules(max_corpus_tokens=asked.max_corpus_tokens)
        on_device = asked.ngrams_on_device and holds and measured.executor.can_plan_ahead
        if on_device:
            measured.executor.look_up_drafts(min_match=rules.min_match, max_match=rules.max_match)
        drafter = RequestNgrams(rules, on_device=on_device)
    return Drafting(
        drafter, build_policy(asked), holds=holds, graph_tokens=measured.verify_token_sizes
    )


def _build_draft_model(
    config: AppConfig,
    path: str,
    spec: ModelSpec,
    measured: Measured,
    grammars: Grammars,
    clock: Clock,
    *,
    holds: bool,
) -> DraftModel:
    """An executor like the target's over the smaller model, with as many blocks."""
    own = load_spec(Path(path))
    if own.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"speculation.model_path: {path} has {own.vocab_size} tokens and the model"
            f" {spec.vocab_size}; drafts need a model of the same vocabulary"
        )
    replica = _drafting_replica(config, path, own, None, measured, grammars)
    executor = _build_drafting_executor(replica, measured.executor, holds=holds)
    return DraftModel(
        executor,
        num_blocks=measured.executor.kv_store.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=replica.max_row_tokens,
        max_tokens=measured.sizes.max_tokens,
        now_s=clock.now_s,
        can_propose_ahead=_gives_drafts(executor),
    )


def _build_feature_drafter(
    config: AppConfig,
    spec: ModelSpec,
    head: FeatureHead,
    measured: Measured,
    grammars: Grammars,
    clock: Clock,
    *,
    holds: bool,
) -> FeatureDrafter:
    """An executor over the head, which reads and writes vectors in the target's store."""
    target = measured.executor
    planes = _planes(target.kv_store, head, spec, target.model.dtype, target.comm)
    head.read_from(planes)
    path, block_size = str(drafter_folder(config)), config.cache.block_size
    given = config, path, head.spec, head.model
    replica = _drafting_replica(*given, measured, grammars)
    replica.keep_exports(lambda _: NextFeatures(planes, block_size))
    executor = _build_drafting_executor(replica, measured.executor, holds=holds)
    return FeatureDrafter(
        executor,
        num_blocks=measured.executor.kv_store.num_blocks,
        block_size=block_size,
        max_model_len=replica.max_row_tokens,
        max_tokens=measured.sizes.max_tokens,
        now_s=clock.now_s,
        can_propose_ahead=_gives_drafts(executor),
    )


def _build_drafting_executor(replica: Replica, target: Executor, *, holds: bool) -> Executor:
    """Its drafts stay on the device, if steps overlap (`holds`) and can be planned ahead."""
    if holds and target.can_plan_ahead:
        replica.draft_for(target)
    return replica.build_executor()


def _gives_drafts(drafter: Executor) -> bool:
    """Whether drafts get into the target's steps without the host."""
    return drafter.guesses is not None and drafter.can_plan_ahead


def _drafting_replica(
    config: AppConfig,
    path: str,
    spec: ModelSpec,
    model: CausalLM | None,
    measured: Measured,
    grammars: Grammars,
) -> Replica:
    """Like the target's, with as many blocks, for another model, which the same ranks share.

    spec: of the whole model; model: the rank's part, None = load it. A model that is given is a
    head, whose K and V have no scales: they stay as they are computed.
    """
    target, comm = measured.executor, measured.executor.comm
    length = model.rotary.max_tokens if model is not None else None
    own = msgspec.structs.replace(
        config.model,
        path=path,
        max_model_len=length,
        dtype=_NAMES[target.model.dtype],
        weights="safetensors",
        quantization="auto",
    )
    num_blocks = target.kv_store.num_blocks
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
        ),
        speculation=SpeculationConfig(),
    )
    kv_scales = load_scales(replaced, spec)
    layout, part = rank_layout(replaced, spec, comm.rank, kv_scales), spec.of_rank(comm.rank)
    given = replaced, part, layout, measured.sizes, model, grammars
    return Replica(*given, comm=comm, kv_scales=kv_scales)


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
