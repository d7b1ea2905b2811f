"""Decides whether a step is computed faster as two batches, from its tokens and measured rates.

One layer of n tokens costs, by the rooflines of its parts,

    compute(n) = sum of  max(weight_bytes / memory_rate, n flops_per_token / product_rate)
    sums(n)    = n bytes_per_token / link_rate

    whole      max(compute(n) + sums(n), launch)
    two        max(C, S, launch_two),  C = compute(a) + compute(b),  S = sums(n)

launch is what the host takes to launch a layer's operations: steps with prompts are split only
where they replay no graph. On an H200's host it decides up to 32,768 tokens of Qwen3-30B-A3B over
two ranks. What cannot hide is the first part's first computation and the second's last sum, once a
step; of many layers that is little. Where reading weights takes longer than the products of half
the tokens, C is more than compute(n): in a mixture of 128 experts, 8 a token, in bf16 on an H200,
below 6,500 tokens. It is no measurement, and leaves out that smaller products are slower.

Pure: all ranks of a model decide alike, from the step's numbers alone.
"""

from dataclasses import dataclass

from configs.schema import ExecutionConfig
from engine.errors import ConfigError
from engine.models.spec import ModelSpec
from kernels.device import DeviceProperties


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The products of one part of a layer."""

    weight_bytes: float  # read by a step, however many tokens it has
    flops_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What one rank does in an average layer."""

    parts: tuple[PartCosts, ...]
    sum_bytes_per_token: float  # over the link, in all of the layer's sums
    has_dp_attention: bool = False  # its exchanges are more to launch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Per second, as measured on one device of its kind, and what its host takes."""

    memory_bytes: float
    flops: float
    link_bytes: float
    # Seconds its host takes to launch a layer, where no graph is replayed: as one batch, as two.
    launches_s: tuple[float, float]
    dp_launches_s: tuple[float, float]  # with DP attention


# bf16 products, reading memory, NCCL between two GPUs of one host, and layers of Qwen3-30B-A3B that
# wait for their launches; with DP attention those of DeepSeek-V2-Lite
# (load_tests/results/h200_moe.md).
# A dense layer has fewer operations to launch; what they take was not measured, so that of a dense
# model fewer steps are split than may pay.
H200 = DeviceRates(
    memory_bytes=3.94e12,
    flops=805e12,
    link_bytes=394e9,
    launches_s=(1.14e-3, 2.94e-3),
    dp_launches_s=(3.5e-3, 7.8e-3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCosts:
    """Predicts the time of one layer, split and not."""

    layer: LayerCosts
    rates: DeviceRates

    def compute_s(self, num_tokens: int) -> float:
        return sum(
            max(
                part.weight_bytes / self.rates.memory_bytes,
                num_tokens * part.flops_per_token / self.rates.flops,
            )
            for part in self.layer.parts
        )

    def sums_s(self, num_tokens: int) -> float:
        return num_tokens * self.layer.sum_bytes_per_token / self.rates.link_bytes

    def gain(self, num_first: int, num_second: int) -> float:
        """The share of a whole step's time that splitting saves; below 0 = it loses."""
        num_tokens = num_first + num_second
        rates, sums_s = self.rates, self.sums_s(num_tokens)
        has_dp = self.layer.has_dp_attention
        launch_s, launch_two_s = rates.dp_launches_s if has_dp else rates.launches_s
        whole_s = max(self.compute_s(num_tokens) + sums_s, launch_s)
        computed_s = self.compute_s(num_first) + self.compute_s(num_second)
        return 1 - max(computed_s, sums_s, launch_two_s) / whole_s


def layer_costs(spec: ModelSpec, num_ranks: int, element_bytes: int) -> LayerCosts:
    """The average layer of one of `num_ranks` ranks; spec: of the part that it computes.

    element_bytes: of a weight and of an activation. Of 8-bit weights both sides of the roofline
    halve, so the border between them stays where it is.
    """
    hidden = spec.hidden_size
    # Rows of gate, up and down in all layers: held, and used by a token on average.
    dense = used = mixed = active = 0.0
    num_mixtures = 0
    for layer in range(spec.num_layers):
        mixture = spec.mixture_at(layer)
        if mixture is None:
            dense += spec.intermediate_size
            used += spec.intermediate_size
        else:
            shared = mixture.shared_size or 0
            num_mixtures += 1
            dense += shared
            # A rank that has all of a shared expert computes its share of the tokens with it.
            used += shared / num_ranks if mixture.may_share_tokens else shared
            mixed += mixture.num_held * mixture.expert_size
            routes_here = mixture.num_active * mixture.num_held / mixture.num_experts
            # With DP attention, as many tokens of each other rank come.
            num_sources = num_ranks if mixture.has_dp_attention else 1
            active += num_sources * routes_here * mixture.expert_size
    attention = _attention_weights(spec)
    held_and_used = (
        (attention, attention),
        *(
            tuple(3 * hidden * rows / spec.num_layers for rows in pair)
            for pair in ((dense, used), (mixed, active))
        ),
    )
    return LayerCosts(
        parts=tuple(
            PartCosts(weight_bytes=held * element_bytes, flops_per_token=2 * used)
            for held, used in held_and_used
        ),
        sum_bytes_per_token=_sent_rows(spec, num_ranks, num_mixtures) * hidden * element_bytes,
        has_dp_attention=spec.has_dp_attention,
    )


def _sent_rows(spec: ModelSpec, num_ranks: int, num_mixtures: int) -> float:
    """Rows that a rank sends for each token of a step in an average layer; as many come."""
    if spec.has_dp_attention:  # to all others and back, in a mixture alone
        return 2 * (num_ranks - 1) * num_mixtures / spec.num_layers
    # A sum sends (n - 1) / n of a row twice; a layer has two sums.
    return 2 * 2 * (num_ranks - 1) / num_ranks


def _attention_weights(spec: ModelSpec) -> int:
    """Numbers in the projections of one layer's attention."""
    hidden, heads, latent = spec.hidden_size, spec.num_heads, spec.latent
    if latent is None:
        return 2 * hidden * (heads + spec.num_kv_heads) * spec.head_dim
    q_rank, queries = latent.q_rank, heads * latent.query_dim
    q = hidden * queries if q_rank is None else q_rank * (hidden + queries)
    values = heads * latent.value_dim
    of_latents = latent.rank * (heads * latent.nope_dim + values)
    return q + hidden * latent.width + of_latents + hidden * values


MIN_GAIN = 0.02  # a split costs attention another plan, and every operation another launch


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRule:
    """Which steps are split. None = of that kind, none."""

    min_prompt_tokens: int | None  # of a step with prompts
    min_decode_rows: int | None  # of a step of single tokens
    costs: OverlapCosts | None = None  # decides instead for prompts, where rates are known

    def pays(self, num_first: int, num_second: int, *, is_decode: bool) -> bool:
        """num_first, num_second: tokens of the two batches, one or more each."""
        assert min(num_first, num_second) > 0, f"{num_first} and {num_second} tokens"
        num_tokens = num_first + num_second
        if is_decode:
            return self.min_decode_rows is not None and num_tokens >= self.min_decode_rows
        if self.costs is not None:
            return self.costs.gain(num_first, num_second) >= MIN_GAIN
        return self.min_prompt_tokens is not None and num_tokens >= self.min_prompt_tokens


def build_rule(
    execution: ExecutionConfig, layer: LayerCosts, device: DeviceProperties
) -> OverlapRule:
    """What the configuration asks for; what is to be measured is not split until it was.

    Raises ConfigError if `auto` lacks the device's rates.
    """
    asked = execution.tbo_min_decode_rows
    decode_rows = None if asked == "measured" else asked
    prompt_tokens = execution.tbo_min_prompt_tokens
    if prompt_tokens == "measured":
        return OverlapRule(min_prompt_tokens=None, min_decode_rows=decode_rows)
    if prompt_tokens != "auto":
        return OverlapRule(min_prompt_tokens=prompt_tokens, min_decode_rows=decode_rows)
    if "H200" not in device.name:
        raise ConfigError(
            f"execution.tbo_min_prompt_tokens: auto knows no rates of {device.name}; set it to a"
            " number of tokens"
        )
    costs = OverlapCosts(layer=layer, rates=H200)
    return OverlapRule(min_prompt_tokens=None, min_decode_rows=decode_rows, costs=costs)
