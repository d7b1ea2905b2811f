"""Up to how many bytes our sums over ranks are used; above, NCCL's are faster.

Data: bytes of the tensor that is summed, by GPU and number of ranks, as measured by
`python -m load_tests.lab.bench_comm`. Limits that nobody has measured are a guess on the safe side.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLimits:
    """In bytes of the tensor; 0 = never."""

    one_shot: int
    two_shots: int  # above `one_shot`
    norm: int  # of a sum with residual and norm: above it, apart
    is_measured: bool = True


_KIB, _MIB = 2**10, 2**20
# Name as the driver gives it, ranks.
_MEASURED: dict[tuple[str, int], SumLimits] = {}
# What SGLang and vLLM measured on H100 and H200 with kernels of the same kind, halved.
_GUESSED = {
    2: SumLimits(one_shot=4 * _MIB, two_shots=0, norm=4 * _MIB, is_measured=False),
    4: SumLimits(one_shot=256 * _KIB, two_shots=4 * _MIB, norm=4 * _MIB, is_measured=False),
    8: SumLimits(one_shot=64 * _KIB, two_shots=4 * _MIB, norm=4 * _MIB, is_measured=False),
}


def limits_of(gpu: str, num_ranks: int) -> SumLimits:
    """gpu: its name; num_ranks: 2, 4 or 8."""
    return _MEASURED.get((gpu, num_ranks), _GUESSED[num_ranks])
