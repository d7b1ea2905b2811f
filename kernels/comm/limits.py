"""Up to how many bytes our operations over ranks are used; above, NCCL's are faster.

Data: bytes of the tensor that is summed, by GPU and number of ranks, as measured by
`python -m load_tests.lab.bench_comm`. Limits that nobody has measured are a guess on the safe side.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLimits:
    """In bytes of the tensor; 0 = never."""

    packets: int  # up to it by packets,
    one_shot: int  # then in one shot, above it in two
    plain: int  # of a sum alone: above it NCCL's
    norm: int  # of a sum with residual and norm, in one or two shots; above it
    stream: int  # in a stream of pieces; above it they are apart
    shares: int  # of what is gathered or scattered: all ranks' shares together
    # Above `shares`, in a stream of pieces: what is scattered with residual and norm, and gathered.
    share_stream: int = 0
    gather_stream: int = 0
    # Of a dense layer's sum with residual and norm: from it on ranks scatter, normalise their
    # shares and gather; 0 = never.
    sequence_parallel: int = 0
    is_measured: bool = True


_KIB, _MIB = 2**10, 2**20
_TIB = 2**40
# Name as the driver gives it, ranks.
_MEASURED: dict[tuple[str, int], SumLimits] = {
    ("NVIDIA H200", 2): SumLimits(
        packets=160 * _KIB,
        one_shot=12 * _MIB,
        plain=32 * _MIB,
        norm=12 * _MIB,
        stream=_TIB,
        shares=32 * _MIB,
    ),
    ("NVIDIA H200", 4): SumLimits(
        packets=0,
        one_shot=1 * _MIB,
        plain=16 * _MIB,
        norm=16 * _MIB,
        stream=0,
        shares=16 * _MIB,
        share_stream=_TIB,
        gather_stream=64 * _MIB,
        sequence_parallel=40 * _MIB,
    ),
}
# What SGLang and vLLM measured on H100 and H200 with kernels of the same kind, halved.
_GUESSED = {
    num_ranks: SumLimits(
        packets=128 * _KIB // num_ranks,
        one_shot=one_shot,
        plain=4 * _MIB,
        norm=4 * _MIB,
        stream=0,
        shares=8 * _MIB,
        is_measured=False,
    )
    for num_ranks, one_shot in ((2, 4 * _MIB), (4, 256 * _KIB), (8, 64 * _KIB))
}


def limits_of(gpu: str, num_ranks: int) -> SumLimits:
    """gpu: its name; num_ranks: 2, 4 or 8."""
    return _MEASURED.get((gpu, num_ranks), _GUESSED[num_ranks])


def sequence_parallel_tokens(gpu: str, num_ranks: int, row_bytes: int) -> int | None:
    """From how many tokens a step on dense ranks is sequence-parallel; None = none is.

    row_bytes: of a token's row of a sum.
    """
    least = limits_of(gpu, num_ranks).sequence_parallel
    return -(-least // row_bytes) if least else None
