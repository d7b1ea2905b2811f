"""GPUs as records, by the vendor's figures: what is chosen for them can be tested without them.

Memory is what the driver reports, a little less than the name says. Shared memory a block is of the
compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
"""

from kernels.device import DeviceProperties

_KIB = 1024
_GIB = 2**30
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}

# name: compute capability, multiprocessors, memory in GiB
GPUS: dict[str, tuple[tuple[int, int], int, float]] = {
    "A100 40GB": ((8, 0), 108, 39.4),
    "A100 80GB": ((8, 0), 108, 79.2),
    "A10": ((8, 6), 72, 22.1),
    "L4": ((8, 9), 58, 22.0),
    "L40S": ((8, 9), 142, 44.4),
    "RTX 4090": ((8, 9), 128, 23.5),
    "RTX 5090": ((12, 0), 170, 31.4),
    "RTX PRO 6000": ((12, 0), 188, 95.0),
    "H100": ((9, 0), 132, 79.1),
    "H200": ((9, 0), 132, 139.8),
    "B200": ((10, 0), 148, 178.4),
}


def gpu(name: str) -> DeviceProperties:
    capability, num_sms, memory_gib = GPUS[name]
    return DeviceProperties(
        name=f"NVIDIA {name}",
        capability=capability,
        memory_bytes=int(memory_gib * _GIB),
        num_sms=num_sms,
        shared_memory_per_block_bytes=SHARED_KIB[capability] * _KIB,
    )
