"""The least time a work can take on a machine, from what it must read, write and multiply.

    decode step   max(bytes / bandwidth, flops / peak), bytes = weights + K and V read and written
    prefill       max(flops / peak, weight bytes / bandwidth), flops = linear + causal attention

Activations, norms, rotation and sampling are left out, so no engine reaches a floor. A mixture
reads the experts that so many tokens choose, if each chooses uniformly.
"""

from dataclasses import dataclass

from engine.kv.layout import DTYPE_BYTES, KvDtype
from engine.models.mixture_spec import MixtureSpec
from engine.models.quantization.scheme import Packing
from engine.models.spec import ModelSpec
from load_tests.lab.works import DECODE_STEPS, Kind, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one device sustains, as measured: device copies and dense matrix products."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Memory and arithmetic overlap perfectly."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def times(self, num_devices: int) -> "Machine":
        """So many that share all work equally and exchange nothing."""
        return Machine(
            bytes_per_s=num_devices * self.bytes_per_s, flops_per_s=num_devices * self.flops_per_s
        )


EXPERTS_ALONE = ("mlp.experts",)  # gpt-oss: what its quantisation is of
H200 = Machine(bytes_per_s=4.29e12, flops_per_s=805e12)  # bf16


def floor_s(work: Work, spec: ModelSpec, dtype: KvDtype, machine: Machine) -> float:
    """Seconds of `work` (of one average step, for decode) at the machine's limits."""
    if work.kind is not Kind.DECODE:
        return _prefill_floor_s(work, spec, dtype, machine)
    # Step i of DECODE_STEPS attends to the prompt, the first token and those of i - 1 steps.
    num_keys = work.num_tokens + (DECODE_STEPS + 1) / 2
    return decode_floor_s(work.num_rows, num_keys, spec, dtype, machine)


def decode_floor_s(
    num_rows: int,
    num_keys: float,
    spec: ModelSpec,
    dtype: KvDtype,
    machine: Machine,
    *,
    num_queries: int = 1,
) -> float:
    """One step of `num_rows` rows that attend to `num_keys` keys each, their own included.

    num_queries: tokens of each row, which its drafts are and one more; keys are read once for all.
    """
    keys, num_tokens = _attended_keys(num_keys, spec), num_rows * num_queries
    # Of the head and of the embedding.
    num_outer = head_parameters(spec) + num_tokens * spec.hidden_size
    num_kept = num_rows * (keys + num_queries * spec.num_layers) * _kept_numbers(spec)
    num_bytes = linear_bytes(spec, dtype, num_tokens)
    num_bytes += _weight_bytes(spec, dtype) * num_outer + DTYPE_BYTES[dtype] * num_kept
    linear = active_parameters(spec) + head_parameters(spec)
    attention = keys * _absorbed_products(spec)
    return machine.seconds(num_bytes, 2 * num_tokens * (linear + attention))


def layer_parameters(spec: ModelSpec) -> int:
    """Elements of one dense layer's linear weights."""
    return _attention_parameters(spec) + 3 * spec.hidden_size * spec.intermediate_size


def _attention_parameters(spec: ModelSpec) -> int:
    latent = spec.latent
    if latent is None:
        heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # q, k, v and the output projection
        return spec.hidden_size * heads * spec.head_dim
    q_size = spec.num_heads * latent.query_dim
    queries = (
        spec.hidden_size * q_size
        if latent.q_rank is None
        else latent.q_rank * (spec.hidden_size + q_size)
    )
    made = spec.num_heads * (latent.nope_dim + latent.value_dim) * latent.rank
    output = spec.hidden_size * spec.num_heads * latent.value_dim
    return queries + spec.hidden_size * latent.width + made + output


def _kept_numbers(spec: ModelSpec) -> int:
    """Of a token in one layer."""
    return 2 * spec.num_kv_heads * spec.head_dim if spec.latent is None else spec.latent.width


def _absorbed_products(spec: ModelSpec) -> int:
    """Of a decoding query and a key, over all heads; latents are keys and values as they are."""
    if spec.latent is None:
        return 2 * spec.num_heads * spec.head_dim
    return spec.num_heads * (spec.latent.width + spec.latent.rank)


def _products(spec: ModelSpec) -> int:
    """Of a prompt's query and a key, over all heads."""
    value_dim = spec.head_dim if spec.latent is None else spec.latent.value_dim
    return spec.num_heads * (spec.head_dim + value_dim)


def read_parameters(spec: ModelSpec, num_tokens: int) -> float:
    """Elements of all layers' linear weights that a step of `num_tokens` tokens reads."""
    mixture = spec.mixture
    num_experts = 0.0 if mixture is None else distinct_experts(mixture, num_tokens)
    return _parameters(spec, num_experts)


def active_parameters(spec: ModelSpec) -> float:
    """Elements of all layers' linear weights that one token is multiplied by."""
    return _parameters(spec, 0 if spec.mixture is None else spec.mixture.num_active)


def distinct_experts(mixture: MixtureSpec, num_tokens: int) -> float:
    """The experts of one layer that `num_tokens` tokens choose, expected if all are as likely."""
    num_experts = mixture.num_experts
    return num_experts * (1 - (1 - mixture.num_active / num_experts) ** num_tokens)


def _parameters(spec: ModelSpec, num_experts: float) -> float:
    """Elements of all layers' linear weights with `num_experts` experts a mixture."""
    mixture = spec.mixture
    if mixture is None:
        return spec.num_layers * layer_parameters(spec)
    dense = layer_parameters(spec)
    sizes = num_experts * mixture.expert_size + (mixture.shared_size or 0)
    of_mixture = spec.hidden_size * (3 * (sizes - spec.intermediate_size) + mixture.num_experts)
    return spec.num_layers * dense + len(mixture.layers) * of_mixture


def linear_bytes(spec: ModelSpec, dtype: KvDtype, num_tokens: int) -> float:
    """Bytes of those weights, without scales where they are quantised."""
    each: float = _weight_bytes(spec, dtype)
    read = read_parameters(spec, num_tokens)
    if spec.quantization is None or spec.quantization.is_made_matrix:
        return each * read
    coded = 1 if spec.quantization.packing in (Packing.FP8, Packing.ONLINE_FP8) else 0.5
    if spec.quantization.targets != EXPERTS_ALONE:
        return coded * read
    other = _parameters(spec, 0)
    return coded * (read - other) + each * other


def _weight_bytes(spec: ModelSpec, dtype: KvDtype) -> int:
    """Of an element of a weight that is not quantised, beside K and V in `dtype`."""
    return DTYPE_BYTES[spec.dtype if dtype == "fp8_e4m3" else dtype]


def head_parameters(spec: ModelSpec) -> int:
    """Elements of the weight that makes logits."""
    return spec.hidden_size * spec.vocab_size


def _prefill_floor_s(work: Work, spec: ModelSpec, dtype: KvDtype, machine: Machine) -> float:
    num_products = work.num_tokens * active_parameters(spec)
    if spec.quantization is not None and spec.quantization.quantizes_activations:
        num_products /= 2  # of e4m3 numbers there are twice as many in a second
    linear = work.num_rows * (num_products + head_parameters(spec))
    pairs = sum(_causal_pairs(work.num_tokens, window) for window in spec.layer_windows)
    attention = work.num_rows * pairs * _products(spec)
    read_bytes = linear_bytes(spec, dtype, work.num_rows * work.num_tokens)
    num_bytes = read_bytes + _weight_bytes(spec, dtype) * head_parameters(spec)
    return machine.seconds(num_bytes, 2 * (linear + attention))


def _attended_keys(num_keys: float, spec: ModelSpec) -> float:
    """Keys a query reads, summed over layers."""
    return sum(
        num_keys if window is None else min(num_keys, window) for window in spec.layer_windows
    )


def _causal_pairs(num_tokens: int, window: int | None) -> int:
    """(query, key) pairs of one prompt in one layer."""
    reach = num_tokens if window is None else min(window, num_tokens)
    return reach * (reach + 1) // 2 + (num_tokens - reach) * reach
