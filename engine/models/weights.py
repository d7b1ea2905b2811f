"""Streams safetensors files into the model's own tensors. Nothing is ever unpickled.

Destinations are allocated first, with q, k and v (and gate and up) concatenated in one tensor, so
that each published tensor is read once, converted, and written to its place. Names and shapes come
from the model's family (`llama_weights`). `random_weights` fills the tensors without any file, for
benchmarks.

A copy from pageable memory (here: a mapped file) to a GPU is bound by one thread that faults pages
in and copies them to the driver's own buffer. Copying to pinned buffers on several threads overlaps
that with the transfers. The buffers are the only memory that this takes on the host.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.models.llama_weights import StackedTensor, layer_tensors, outer_tensors
from engine.models.mixture_spec import MixtureSpec
from engine.models.quantization.loading import (
    DecodedStack,
    PublishedPart,
    PublishedStack,
    QuantizedStack,
)
from engine.models.quantization.published_tensors import (
    is_made_matrix,
    needed_of_layer,
    needed_tensors,
    quantization_of,
    unquantised,
)
from engine.models.quantization.scheme import Quantization
from engine.models.source_reading import read_source
from engine.models.sources import Source
from engine.models.spec import ModelSpec
from engine.models.weight_files import check_weights, find_tensors
from engine.ranks.rank import WHOLE_MODEL, Rank

logger = logging.getLogger(__name__)

NUM_LANES = 4
# Large enough that a transfer takes far longer than starting it, small enough to split a tensor.
CHUNK_BYTES = 16 * 2**20


class TensorCopier(Protocol):
    """Copies tensors, converting their dtype; sources must stay valid until `wait_copied`."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy `source`, on the host, to `destination` of the same shape, which is contiguous.

        source: contiguous, or columns of a matrix.
        """
        ...

    def wait_copied(self) -> None:
        """Block until every copy so far is complete; raises the error of any that failed."""
        ...


class DirectCopier:
    """Copies at once, on the calling thread."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)

    def wait_copied(self) -> None:
        """Returns at once: every copy is complete when `copy` returns."""


class PinnedCopier(AbstractContextManager["PinnedCopier"]):
    """Copies chunks on `NUM_LANES` threads; the next free lane takes the next chunk."""

    def __init__(self, device: torch.device) -> None:
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(NUM_LANES):
            self._lanes.put(_Lane(device))
        self._threads = ThreadPoolExecutor(NUM_LANES, thread_name_prefix="weights")
        self._copies: list[Future[None]] = []

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        for chunk, target in chunk_pairs(source, destination, CHUNK_BYTES):
            self._copies.append(self._threads.submit(self._copy_chunk, chunk, target))

    def wait_copied(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()
        for _ in range(NUM_LANES):
            lane = self._lanes.get()
            lane.stream.synchronize()
            self._lanes.put(lane)

    def _copy_chunk(self, source: Tensor, destination: Tensor) -> None:
        lane = self._lanes.get()  # never waits: there are as many lanes as threads
        try:
            lane.copy(source, destination)
        finally:
            self._lanes.put(lane)


class _Lane:
    """A stream with two pinned buffers: one is filled while the other is transferred."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Destinations may be memory that earlier work on the caller's stream still uses.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._is_sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: Tensor, destination: Tensor) -> None:
        buffer, is_sent = self._buffers[self._turn], self._is_sent[self._turn]
        self._turn = 1 - self._turn
        is_sent.synchronize()  # the previous transfer from this buffer is complete
        staged = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        staged.copy_(source)
        with torch.cuda.stream(self.stream):
            # Two copies, so that the device converts the dtype, not this thread.
            destination.copy_(staged.to(destination.device, non_blocking=True))
            is_sent.record(self.stream)


def copier_for(device: torch.device) -> AbstractContextManager[TensorCopier]:
    """The copier for `device`; leaving its context frees threads and buffers."""
    return PinnedCopier(device) if device.type == "cuda" else nullcontext(DirectCopier())


def chunk_pairs(
    source: Tensor, destination: Tensor, chunk_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors as pairs of pieces, of at most `chunk_bytes` of the source each.

    They are flat, but of columns of a matrix: those are pieces of whole rows.
    """
    num_elements = chunk_bytes // source.element_size()
    is_of_rows = not source.is_contiguous() and source.dim() == 2
    if is_of_rows and source.shape[1] <= num_elements:
        num_rows = num_elements // source.shape[1]
        return zip(torch.split(source, num_rows), torch.split(destination, num_rows), strict=True)
    source = source.contiguous()
    sources = torch.split(source.view(-1), num_elements)
    return zip(sources, torch.split(destination.view(-1), num_elements), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Tensors of one decoder layer; H heads, K KV heads, D head_dim, I intermediate size.

    In a mixture, I is of each of the E experts, and S of the expert that all tokens pass.
    """

    # [hidden]
    input_norm: Tensor
    # [hidden]  before the MLP
    post_norm: Tensor
    # [(H + 2 K) D, hidden]; with latent attention [H D or its rank + width of the latent, hidden]
    qkv: LinearWeight
    # [hidden, H D]; with latent attention D is of a value
    output: LinearWeight
    # [2 I, hidden]; in a mixture [E, 2 I, hidden]
    gate_up: LinearWeight
    # [hidden, I]; in a mixture [E, hidden, I]
    down: LinearWeight
    # [D]; with latent attention [rank of the queries], [rank of the latent]
    q_norm: Tensor | None
    k_norm: Tensor | None
    # [hidden]  of the outputs of attention and MLP; None = they are added as they are
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    # [H]; None = the softmax of a head has no sink
    sinks: Tensor | None = None
    # [E, hidden]; None = the layer is dense
    router: LinearWeight | None = None
    # [2 S, hidden], [hidden, S], [1, hidden]; None = no expert is shared
    shared_gate_up: LinearWeight | None = None
    shared_down: LinearWeight | None = None
    shared_gate: LinearWeight | None = None
    # fp32 [E]; None = the experts of the best scores are chosen
    route_bias: Tensor | None = None
    # Of latent attention: [H D, rank of the queries], None = qkv makes them; [H (N + V), rank] with
    # the rows of each head's key (not rotated, N) and value (V).
    q_up: LinearWeight | None = None
    kv_up: LinearWeight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All tensors of a model, in one dtype on one device."""

    # [vocab, hidden]
    embedding: Tensor
    layers: list[LayerWeights]
    # [hidden]
    final_norm: Tensor
    # [vocab, hidden]; the embedding itself where tied or not used
    head: Tensor


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = WHOLE_MODEL,
) -> ModelWeights:
    """Load the tensors of one rank; reads no more of the files than its share.

    Raises ConfigError naming file, tensor, expected and found shape.
    """
    files = check_weights(folder, spec)
    _warn_of_matrices(folder, spec, dtype)
    weights, destinations = allocate_weights(spec, dtype=dtype, device=device, rank=rank)
    _fill(files, destinations, device)
    return weights


def _warn_of_matrices(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    if spec.quantization is not None and spec.quantization.is_made_matrix:
        logger.warning(
            "%s: no kernel multiplies by these weights (%s): they are made matrices in %s,"
            " with the memory and the speed of an unquantised model; the same model in FP8, or"
            " unquantised with model.quantization: fp8, takes half the memory",
            folder,
            spec.quantization.packing.value,
            dtype,
        )


def load_layer(
    folder: Path,
    spec: ModelSpec,
    layer: int,
    extra: Mapping[str, StackedTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = WHOLE_MODEL,
) -> tuple[LayerWeights, dict[str, Tensor]]:
    """Load one rank's part of one layer, and of `extra` tensors, by field.

    extra: tensors that are never quantised. Raises ConfigError as `load_weights` does.
    """
    files = find_tensors(folder, spec, needed_of_layer(spec, layer) | unquantised(extra))
    allocation = _Allocation(spec, dtype=dtype, device=device, rank=rank)
    weights, others = allocation.layer(layer), allocation.dense(extra)
    _fill(files, allocation.destinations, device)
    return weights, others


def _fill(
    files: Mapping[Path, Mapping[str, Source]],
    destinations: "Mapping[str, Part | PublishedPart]",
    device: torch.device,
) -> None:
    with copier_for(device) as copier:
        for path, sources in files.items():
            _copy_file(path, sources, destinations, copier)
    found = {name for sources in files.values() for name in sources}
    for name, part in destinations.items():
        if isinstance(part, PublishedPart) and name not in found:
            part.leave_out()


def _copy_file(
    path: Path,
    sources: Mapping[str, Source],
    destinations: "Mapping[str, Part | PublishedPart]",
    copier: TensorCopier,
) -> None:
    """sources, destinations: by published name."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name, source in sources.items():
                part = destinations.get(name)
                if part is None:
                    continue  # another rank's
                if isinstance(part, PublishedPart):
                    part.take(partial(_read_share, file, source), copier)
                else:
                    read = read_source(file, source, part.share, len(part.tensor))
                    copier.copy(read, part.tensor)
            copier.wait_copied()  # must complete while the file is still mapped
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


def _read_share(file: Any, source: Source, share: tuple[slice, ...] | None) -> Tensor:  # noqa: ANN401
    """A share of a published tensor, also where a file has it in one with others."""
    return read_source(file, source, share, 0 if share is None else share[0].stop).contiguous()


@dataclass(frozen=True, slots=True)
class Part:
    """The destination of a published tensor, and the slices of it to copy; None = all."""

    tensor: Tensor
    share: tuple[slice, ...] | None


# ---- destinations -------------------------------------------------------------------------------


def allocate_weights(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, rank: Rank = WHOLE_MODEL
) -> tuple[ModelWeights, dict[str, Part | PublishedPart]]:
    """The uninitialised tensors of one rank, and published name -> the part of them it fills.

    The parts cover every tensor but for padding, which is zero; they do not overlap and are
    contiguous. A tensor that another rank holds has no part.
    """
    allocation = _Allocation(spec, dtype=dtype, device=device, rank=rank)
    outer = allocation.dense(outer_tensors(spec))
    weights = ModelWeights(
        embedding=outer["embedding"],
        layers=[allocation.layer(index) for index in range(spec.num_layers)],
        final_norm=outer["final_norm"],
        head=outer.get("head", outer["embedding"]),
    )
    return weights, allocation.destinations


class _Allocation:
    """Uninitialised tensors of one rank; `destinations` as of `allocate_weights`."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, rank: Rank
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._rank = rank
        self.destinations: dict[str, Part | PublishedPart] = {}

    def dense(self, tensors: Mapping[str, StackedTensor]) -> dict[str, Tensor]:
        """By field, those that the rank holds."""
        rank, allocated = self._rank, {}
        for field, stacked in tensors.items():
            if not stacked.is_on(rank):
                continue
            mine = stacked.of_rank(rank)
            held = torch.float32 if stacked.is_float32 else self._dtype
            tensor = torch.empty(mine.shape, dtype=held, device=self._device)
            parts = torch.split(tensor, list(mine.num_rows.values()))
            for name, part in zip(mine.num_rows, parts, strict=True):
                share = stacked.share_of(name, rank)
                num_filled = len(part) if share is None else share[0].stop - share[0].start
                part[num_filled:].zero_()
                self.destinations[name] = Part(part[:num_filled], share)
            allocated[field] = tensor
        return allocated

    def _stack(self, tensor: StackedTensor, how: Quantization) -> PublishedStack:
        is_matrix = is_made_matrix(tensor, how, self._rank)
        kind = DecodedStack if is_matrix else QuantizedStack
        return kind(tensor, how, dtype=self._dtype, device=self._device, rank=self._rank)

    def layer(self, index: int) -> LayerWeights:
        spec, tensors = self._spec, layer_tensors(self._spec, index)
        found = {field: quantization_of(spec, tensor) for field, tensor in tensors.items()}
        stacks = {
            field: self._stack(tensors[field], how)
            for field, how in found.items()
            if how is not None
        }
        for stack in stacks.values():
            self.destinations.update(stack.destinations())
        plain = self.dense({field: t for field, t in tensors.items() if field not in stacks})
        return _layer(plain, stacks, spec.of_rank(self._rank).mixture_at(index))


def _layer(
    tensors: Mapping[str, Tensor],
    stacks: Mapping[str, PublishedStack],
    mixture: MixtureSpec | None,
) -> LayerWeights:
    def linear(field: str) -> LinearWeight:
        bias = tensors.get(f"{field}_bias")
        if field in stacks:
            return stacks[field].weight(bias)
        return LinearWeight(tensors[field], bias)

    def optional(field: str) -> LinearWeight | None:
        return linear(field) if field in tensors or field in stacks else None

    def experts(field: str) -> LinearWeight:
        weight = linear(field)
        return weight if mixture is None else weight.by_expert(mixture.num_held)

    return LayerWeights(
        input_norm=tensors["input_norm"],
        post_norm=tensors["post_norm"],
        qkv=linear("qkv"),
        output=linear("output"),
        gate_up=experts("gate_up"),
        down=experts("down"),
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
        attention_output_norm=tensors.get("attention_output_norm"),
        mlp_output_norm=tensors.get("mlp_output_norm"),
        sinks=tensors.get("sinks"),
        router=optional("router"),
        shared_gate_up=optional("shared_gate_up"),
        shared_down=optional("shared_down"),
        shared_gate=optional("shared_gate"),
        route_bias=tensors.get("route_bias"),
        q_up=optional("q_up"),
        kv_up=optional("kv_up"),
    )


# Small and not constant: on simple data a matrix multiplication draws less power and so runs
# faster than with a trained model's weights.
_LARGEST = 1e-3


def random_weights(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = WHOLE_MODEL,
    seed: int = 0,
) -> ModelWeights:
    """Every linear, bias and embedding uniform in [-1e-3, 1e-3]; norm weights are 1.

    Norm weights as small as the others would shrink each layer's input until every activation is
    nearly zero, and the speed of a matrix multiplication depends on its data. Every rank draws
    every tensor whole and keeps its share, so that ranks share the model that one rank would have.
    """
    weights, parts = allocate_weights(spec, dtype=dtype, device=device, rank=rank)
    generator = torch.Generator(device).manual_seed(seed)
    # Each rank draws numbers of its own for quantised tensors: they are shares of no one model.
    quantised = torch.Generator(device).manual_seed(seed + 1 + rank.index)
    for name, needed in needed_tensors(spec).items():
        part = parts.get(name)
        if isinstance(part, PublishedPart):
            part.fill_randomly(_LARGEST, quantised)
        elif name.endswith("norm.weight"):
            assert part is not None, f"every rank holds {name}"
            part.tensor.fill_(1.0 - spec.norm_offset)
        elif part is not None and part.share is None:
            part.tensor.uniform_(-_LARGEST, _LARGEST, generator=generator)
        else:
            whole = torch.empty(needed.shape, dtype=dtype, device=device)
            whole.uniform_(-_LARGEST, _LARGEST, generator=generator)
            if part is not None and part.share is not None:
                part.tensor.copy_(whole[part.share])
    return weights
