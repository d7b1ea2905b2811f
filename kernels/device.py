"""What a device is: a plain record, read once, from which kernels and step sizes are chosen.

A test describes a GPU that it does not have by making the record itself.
"""

import os
from dataclasses import dataclass
from functools import cache

import torch

# The oldest GPUs that compute in bfloat16 and for which Triton compiles.
MIN_CAPABILITY = (8, 0)
# The interpreter on a CPU runs programs one after the other and has no shared memory to run out of.
_CPU_PROGRAMS = 2
_CPU_SHARED_BYTES = 2**30
# Beside its tiles a kernel keeps barriers and sums; more than any was compiled to. CUDA reserves as
# much of a multiprocessor for each program.
_RESERVED_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """The properties of a device that choices depend on."""

    name: str
    capability: tuple[int, int] | None  # CUDA's compute capability; None = a CPU
    memory_bytes: int
    num_sms: int  # multiprocessors
    shared_memory_per_block_bytes: int  # at most, if a kernel asks for more than 48 KiB

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    def describe(self) -> str:
        """The record in words, for a log line."""
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        if self.capability is None:
            return f"{self.name}, {memory}"
        major, minor = self.capability
        return (
            f"{self.name} (compute capability {major}.{minor}, {self.num_sms} SMs, {memory},"
            f" {self.shared_memory_per_block_bytes // 1024} KiB shared memory a block)"
        )


@cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Reads the properties of a device; of a CPU its memory alone means anything."""
    if device.type != "cuda":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceProperties(
            name="CPU",
            capability=None,
            memory_bytes=memory_bytes,
            num_sms=_CPU_PROGRAMS,
            shared_memory_per_block_bytes=_CPU_SHARED_BYTES,
        )
    found = torch.cuda.get_device_properties(device)
    return DeviceProperties(
        name=found.name,
        capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        num_sms=found.multi_processor_count,
        # torch's own type hints lack it
        shared_memory_per_block_bytes=found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def stages_for(
    programs_per_sm: int, *, least: int, stage_bytes: int, shared_memory_bytes: int
) -> int:
    """`least` pipeline stages, or as many more as leave a multiprocessor no room for more programs.

    programs_per_sm: of a kernel whose programs are spread evenly; 0 = any number. With room for
    more, those that start while another kernel still runs crowd where that ends first. Otherwise as
    `stages_that_fit`.
    """
    given = shared_memory_bytes + _RESERVED_BYTES  # of a multiprocessor
    wanted = least
    if programs_per_sm > 0:
        crowded = given // (programs_per_sm + 1) - _RESERVED_BYTES
        enough = max(least, crowded // stage_bytes + 1)
        if programs_per_sm * (enough * stage_bytes + _RESERVED_BYTES) <= given:
            wanted = enough
    return stages_that_fit(wanted, stage_bytes=stage_bytes, shared_memory_bytes=shared_memory_bytes)


def why_unsupported(device: DeviceProperties) -> str | None:
    """Why no model can run on `device`; None = it can. A CPU is supported."""
    if device.capability is None or device.capability >= MIN_CAPABILITY:
        return None
    major, minor = device.capability
    return (
        f"{device.name} has compute capability {major}.{minor}; bfloat16 and the Triton kernels"
        " need 8.0 or newer (A100, A10, L4, RTX 30 series and later)"
    )


def stages_that_fit(
    num_stages: int, *, stage_bytes: int, other_bytes: int = 0, shared_memory_bytes: int
) -> int:
    """Returns the pipeline stages, at most `num_stages`, whose tiles fit; 0 if not even one does.

    stage_bytes: tiles of one stage. other_bytes: tiles that are kept beside all stages. Counts a
    buffer for every stage, which Hopper takes; before it Triton needs one fewer.
    """
    left = shared_memory_bytes - _RESERVED_BYTES - other_bytes
    return max(0, min(num_stages, left // stage_bytes))
