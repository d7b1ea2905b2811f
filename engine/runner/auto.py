"""Chooses what the configuration leaves as `auto`, for one device and one model: pure functions.

Before the model loads, by what is known of device and model (`choose_sizes`):

    max_num_seqs            KV memory / KV of 1,024 tokens; a multiple of 8 from 8 to 256
    max_num_batched_tokens  upper bound, for which buffers and graphs are made: a power of two from
                            512 to 8,192, at most 64 tokens for each multiprocessor, whose tensors
                            take at most 2 % of the memory; 512 on a CPU
    batch_prefill_max_rows  128, halved until the graphs' logits take at most 5 % of the memory
    max_graph_tokens        of steps with drafts, on a GPU: all rows' with `max_drafts` each, 512
                            and a step's at most, halved likewise; 0 where there is no drafter

Once it has loaded, by steps that were measured (`choose_limits`). The unit is a decode step of up
to 16 rows with a short history: mostly the time to read the weights, which any step takes.

    max_step_ms             8 decode steps, from 20 to 250 ms
    max_mixed_step_ms       3 decode steps, from 8 to 100 ms
    max_busy_step_ms        17 decode steps, from 40 to 500 ms
    max_num_batched_tokens  the most tokens whose step takes at most that busy step; at least two a
                            row, at most what was built for and measured
    max_queued_tokens       prompt tokens computed in 5 s, at the best rate of a measured step

The multiples are those of configs/h200_1_laps.yaml, which was tuned by hand: 36, 14 and 80 ms with
decode steps of 4.6 ms. By their data sheets GPUs from A100 to B200 read the weights in the time in
which they compute some 130 to 210 tokens, so equal multiples give chunks of similar lengths. The
bounds in ms are for models so small that launches dominate, and for GPUs so slow that answers would
visibly stop. Numbers that the configuration has are kept. Knows no tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from configs.resolved import ResolvedLaps, ResolvedScheduler, resolve_laps, resolve_scheduler
from configs.schema import AppConfig
from engine.cost_model import StepWork
from engine.errors import ConfigError
from engine.kv.layout import KvLayout
from engine.models.spec import ModelSpec
from engine.runner.graph_sizes import FEW_ROWS, ragged_sizes, verify_sizes
from kernels.device import DeviceProperties, why_unsupported

CPU_BLOCKS = 2048  # default for cache.num_blocks on a CPU

_ROW_TOKENS = 1024  # KV that a row is expected to hold
_ROW_MULTIPLE = 8
_MIN_ROWS, _MAX_ROWS = 8, 256
_OTHER_SHARE = 0.05  # of a GPU's memory, for activations, graphs and the libraries

_MIN_STEP_TOKENS, _MAX_STEP_TOKENS = 512, 8192
_CPU_STEP_TOKENS = 512
_TOKENS_PER_SM = 64
_ACTIVATIONS_SHARE = 0.02
_LOGITS_SHARE = 0.05
# 64 rows of seven drafts. On an H200 the device takes 13 ms for more, which hides their launches.
_MAX_VERIFY_TOKENS = 512
_VERIFY_KEY = "speculation.max_graph_tokens"
_STEP_TOKEN_MULTIPLE = 64

_QUEUE_S = 5.0
_QUEUE_MULTIPLE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeSteps:
    """A step time as a multiple of a decode step, within bounds in milliseconds."""

    key: str
    factor: float
    least_ms: float
    most_ms: float

    def milliseconds(self, decode_s: float) -> float:
        wanted_ms = 1e3 * self.factor * decode_s
        return round(min(max(wanted_ms, self.least_ms), self.most_ms), 1)

    def why(self, decode_s: float) -> str:
        return (
            f"{self.factor:g} x {1e3 * decode_s:.2f} ms of a decode step,"
            f" {self.least_ms:g} to {self.most_ms:g}"
        )


_STEP = _DecodeSteps(key="max_step_ms", factor=8.0, least_ms=20.0, most_ms=250.0)
_MIXED = _DecodeSteps(key="max_mixed_step_ms", factor=3.0, least_ms=8.0, most_ms=100.0)
_BUSY = _DecodeSteps(key="max_busy_step_ms", factor=17.0, least_ms=40.0, most_ms=500.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for a key that said `auto`."""

    key: str
    value: int | float
    why: str

    def describe(self) -> str:
        value = f"{self.value:,}".removesuffix(".0")
        return f"{self.key} {value} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes that a model takes on a device."""

    weights_bytes: int
    kv_token_bytes: int
    step_token_bytes: int  # tensors of a step, for each of its tokens
    logits_bytes: int  # of one row
    max_model_len: int  # tokens

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: KvLayout, weights_bytes: int, element_bytes: int
    ) -> "Footprint":
        """element_bytes: of what a step computes with."""
        # Alive at a time: the stream and its norm, q, k and v or gate and up, and their product.
        elements = 4 * spec.hidden_size + _attention_elements(spec) + _feed_forward_elements(spec)
        return cls(
            weights_bytes=weights_bytes,
            kv_token_bytes=layout.block_bytes // layout.block_size,
            step_token_bytes=elements * element_bytes,
            logits_bytes=spec.vocab_size * element_bytes,
            max_model_len=spec.max_model_len,
        )


def _attention_elements(spec: ModelSpec) -> int:
    """Elements a token: q, k and v; with latent attention also the keys and values made of it."""
    latent = spec.latent
    if latent is None:
        return (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    of_head = latent.query_dim + latent.nope_dim + 2 * latent.value_dim
    return spec.num_heads * of_head + 2 * latent.width + (latent.q_rank or 0)


def _feed_forward_elements(spec: ModelSpec) -> int:
    """Elements a token: gate, up and their product; in a mixture also each expert's output."""
    mixture = spec.mixture
    if mixture is None:
        return 3 * spec.intermediate_size
    routed = mixture.num_active * (3 * mixture.expert_size + spec.hidden_size)
    return max(3 * spec.intermediate_size, routed + 3 * (mixture.shared_size or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest steps that an executor is built for."""

    max_rows: int
    max_tokens: int
    max_graph_rows: int  # of a prompt step that replays a ragged graph
    max_verify_tokens: int = 0  # of a step with drafts that replays a graph of its own; 0 = none
    choices: tuple[Choice, ...] = ()

    def without_verification(self) -> "StepSizes":
        """The same where no step with drafts is captured."""
        choices = tuple(choice for choice in self.choices if choice.key != _VERIFY_KEY)
        return replace(self, max_verify_tokens=0, choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Steps that were measured on the loaded model."""

    decode_s: float  # median of a step of up to 16 rows of one token each
    # (new tokens, median seconds) of steps with prompts without a history, ascending
    chunks: tuple[tuple[int, float], ...]
    samples: tuple[tuple[StepWork, float], ...]  # (work, seconds) of each step that counts
    took_s: float

    @property
    def tokens_per_s(self) -> float:
        """The best rate of a measured step with prompts."""
        return max(num_tokens / seconds for num_tokens, seconds in self.chunks)

    def max_tokens_within(self, seconds: float) -> int:
        """The most new tokens whose step takes at most `seconds`, between measured steps.

        Never more than were measured; 0 if a decode step alone takes longer.
        """
        most = 0
        for (low, low_s), (high, high_s) in pairwise([(0, self.decode_s), *self.chunks]):
            if low_s > seconds:
                break
            share = 1.0 if high_s <= seconds else (seconds - low_s) / (high_s - low_s)
            most = max(most, low + int(share * (high - low)))
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Everything that a worker runs by and that the configuration may leave as `auto`."""

    scheduler: ResolvedScheduler
    laps: ResolvedLaps
    max_queued_tokens: int  # this worker's part of edge.max_queued_tokens
    choices: tuple[Choice, ...] = ()


# ---- before the model loads ----------------------------------------------------------------------


def choose_sizes(
    config: AppConfig, device: DeviceProperties, model: Footprint, *, decodes: bool = True
) -> StepSizes:
    """The sizes to build an executor for.

    decodes: whether it has steps with drafts, if there is a drafter: prefill workers have none.
    Raises ConfigError for a GPU that no model runs on, or whose memory the weights alone exceed.
    """
    reason = why_unsupported(device)
    if reason is not None:
        raise ConfigError(f"model.device: {reason}")
    choices: list[Choice] = []

    def choose(key: str, value: int, why: str) -> int:
        choices.append(Choice(key=key, value=value, why=why))
        return value

    scheduler, graph_rows = config.scheduler, config.laps.batch_prefill_max_rows
    rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if rows == "auto":
        kv_tokens = _kv_tokens(config, device, model)
        longest = min(model.max_model_len, config.model.max_model_len or model.max_model_len)
        most = _rows(kv_tokens, min(_ROW_TOKENS, longest))
        if tokens != "auto":
            most = min(most, tokens)  # every row may decode in one step
        why = f"KV memory for about {kv_tokens:,} tokens"
        rows = choose("scheduler.max_num_seqs", most, why)
    if tokens == "auto":
        tokens = _step_tokens(device, model, rows)
    if graph_rows == "auto":
        most = _graph_rows(device, model, rows=rows, tokens=tokens)
        why = f"logits of {_logits_bytes(model, tokens, most) / 2**20:,.0f} MiB"
        graph_rows = choose("laps.batch_prefill_max_rows", most, why)
    verify_tokens = config.speculation.max_graph_tokens
    if verify_tokens == "auto":
        verify_tokens = 0
        if decodes and device.is_gpu and config.speculation.drafter != "none":
            most = _verify_tokens(config, device, model, rows=rows, tokens=tokens)
            why = f"logits of {_verify_logits_bytes(model, rows, most) / 2**20:,.0f} MiB"
            verify_tokens = choose(_VERIFY_KEY, most, why)
    return StepSizes(
        max_rows=rows,
        max_tokens=tokens,
        max_graph_rows=graph_rows,
        max_verify_tokens=verify_tokens,
        choices=tuple(choices),
    )


def _rows(kv_tokens: int, row_tokens: int) -> int:
    fitting = kv_tokens // row_tokens
    return min(max(fitting // _ROW_MULTIPLE * _ROW_MULTIPLE, _MIN_ROWS), _MAX_ROWS)


def _kv_tokens(config: AppConfig, device: DeviceProperties, model: Footprint) -> int:
    """Tokens whose KV is expected to fit; what fits is measured when the engine is built."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size
    if not device.is_gpu:
        return CPU_BLOCKS * cache.block_size
    allowed = cache.gpu_memory_utilization * device.memory_bytes
    if model.weights_bytes >= allowed:
        raise ConfigError(
            f"model.path: {model.weights_bytes / 2**30:.1f} GiB of weights do not fit"
            f" {cache.gpu_memory_utilization:.0%} of the {device.memory_bytes / 2**30:.1f} GiB of"
            f" {device.name}; use a smaller model or a GPU with more memory"
        )
    left = allowed - model.weights_bytes - _OTHER_SHARE * device.memory_bytes
    return max(0, int(left)) // model.kv_token_bytes


def _step_tokens(device: DeviceProperties, model: Footprint, rows: int) -> int:
    """Tokens to build for; at least half of them for prompts."""
    if not device.is_gpu:
        return max(_CPU_STEP_TOKENS, 2 * rows)
    most = min(
        _TOKENS_PER_SM * device.num_sms,
        int(_ACTIVATIONS_SHARE * device.memory_bytes) // model.step_token_bytes,
        _MAX_STEP_TOKENS,
    )
    return max(_MIN_STEP_TOKENS, 1 << (max(most, 1).bit_length() - 1), 2 * rows)


def _graph_rows(device: DeviceProperties, model: Footprint, *, rows: int, tokens: int) -> int:
    """Each graph keeps the logits of its rows: many graphs of many rows take a large share."""
    graph_rows = min(rows, FEW_ROWS)
    while graph_rows > 1 and (
        _logits_bytes(model, tokens, graph_rows) > _LOGITS_SHARE * device.memory_bytes
    ):
        graph_rows //= 2
    return graph_rows


def _logits_bytes(model: Footprint, tokens: int, graph_rows: int) -> int:
    sizes = ragged_sizes(graph_rows, tokens, max_graph_rows=graph_rows).sizes
    return sum(size.num_rows for size in sizes) * model.logits_bytes


def _verify_tokens(
    config: AppConfig, device: DeviceProperties, model: Footprint, *, rows: int, tokens: int
) -> int:
    """Such a graph keeps the logits of all its tokens."""
    most = min(rows * (1 + config.speculation.max_drafts), tokens, _MAX_VERIFY_TOKENS)
    while most > 1 and (
        _verify_logits_bytes(model, rows, most) > _LOGITS_SHARE * device.memory_bytes
    ):
        most //= 2
    return most


def _verify_logits_bytes(model: Footprint, rows: int, most: int) -> int:
    return sum(size.num_lines for size in verify_sizes(rows, most)) * model.logits_bytes


# ---- when it has loaded --------------------------------------------------------------------------


def needs_calibration(config: AppConfig) -> bool:
    """Whether a key is `auto` that only measured steps can decide."""
    laps = config.laps
    return "auto" in (
        config.scheduler.max_num_batched_tokens,
        laps.max_step_ms,
        laps.max_mixed_step_ms,
        laps.max_busy_step_ms,
        config.edge.max_queued_tokens,
    )


def choose_limits(config: AppConfig, sizes: StepSizes, calibration: Calibration | None) -> Limits:
    """The limits of a worker that was built for `sizes`.

    `calibration`: of the loaded model, if `needs_calibration`.
    """
    choices = list(sizes.choices)
    if calibration is not None:
        choices += _measured_choices(config, sizes, calibration)
    chosen: dict[str, int | float] = {
        "max_num_seqs": sizes.max_rows,
        "max_num_batched_tokens": sizes.max_tokens,
        "batch_prefill_max_rows": sizes.max_graph_rows,
    }
    chosen |= {choice.key.partition(".")[2]: choice.value for choice in choices}
    queued = config.edge.max_queued_tokens
    return Limits(
        scheduler=resolve_scheduler(config.scheduler, chosen),
        laps=resolve_laps(config.laps, chosen),
        max_queued_tokens=int(chosen["max_queued_tokens"]) if queued == "auto" else queued,
        choices=tuple(choices),
    )


def _measured_choices(
    config: AppConfig, sizes: StepSizes, calibration: Calibration
) -> Iterator[Choice]:
    decode_s, laps = calibration.decode_s, config.laps
    for rule in (_STEP, _MIXED, _BUSY):
        if getattr(laps, rule.key) == "auto":
            value_ms, why = rule.milliseconds(decode_s), rule.why(decode_s)
            yield Choice(key=f"laps.{rule.key}", value=value_ms, why=why)
    if config.scheduler.max_num_batched_tokens == "auto":
        busy_ms = _BUSY.milliseconds(decode_s)
        fitting = calibration.max_tokens_within(1e-3 * busy_ms)
        fitting -= fitting % _STEP_TOKEN_MULTIPLE
        tokens = min(max(fitting, 2 * sizes.max_rows), sizes.max_tokens)
        why = f"steps of {busy_ms:g} ms; built for {sizes.max_tokens:,}"
        yield Choice(key="scheduler.max_num_batched_tokens", value=tokens, why=why)
    if config.edge.max_queued_tokens == "auto":
        rate = calibration.tokens_per_s
        tokens = max(_QUEUE_MULTIPLE, int(_QUEUE_S * rate) // _QUEUE_MULTIPLE * _QUEUE_MULTIPLE)
        why = f"{_QUEUE_S:g} s at {rate:,.0f} tokens/s"
        yield Choice(key="edge.max_queued_tokens", value=tokens, why=why)


def describe(device: DeviceProperties, limits: Limits, calibration: Calibration | None) -> str:
    """One line for the log: what was chosen for which device, and why."""
    chosen = "; ".join(choice.describe() for choice in limits.choices)
    took = "" if calibration is None else f"; steps measured in {calibration.took_s:.1f} s"
    return f"chosen for {device.describe()}: {chosen}{took}"
