"""Compiles kernels for a GPU that is not here, and returns what the compiler says of each.

Triton compiles for any target on any machine. Here a call of a kernel's wrapper, with tensors of
the right shapes on a CPU, compiles the kernel for the target and launches nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.device import DeviceProperties

WARP_THREADS = 32
# Functions of a device that kernels ask, and the capability from which they answer yes.
_FROM_CAPABILITY = {"pdl_supported": (9, 0), "knows_e4m3": (8, 9), "uses_ptx": (8, 0)}


class _Driver:
    """Triton's driver, as far as a compilation asks it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP_THREADS)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiled_for(
    device: DeviceProperties, *modules: ModuleType, kept: list[Any] | None = None
) -> Iterator[dict[str, int]]:
    """Yields kernel -> bytes of shared memory, the most of its compilations in this context.

    `modules`: those with the kernels' wrappers, which then see `device` and compile for it.
    kept: gets what was compiled.
    """
    assert device.capability is not None
    capability = device.capability
    found: dict[str, int] = {}
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        made = launch(kernel, *args, **(options | {"warmup": True}))
        found[kernel.__name__] = max(found.get(kernel.__name__, 0), made.metadata.shared)
        if kept is not None:
            kept.append(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        _pretend(patch, device, modules)
        patch.setattr(driver, "_active", _Driver(capability))
        yield found
        _forget(modules)


def _pretend(
    patch: pytest.MonkeyPatch, device: DeviceProperties, modules: tuple[ModuleType, ...]
) -> None:
    """Let the modules see `device`."""
    assert device.capability is not None
    _forget(modules)
    for module in modules:
        for name in list(vars(module)):
            if name == "device_properties":
                patch.setattr(module, name, lambda _: device)
            if name in _FROM_CAPABILITY:
                answer = device.capability >= _FROM_CAPABILITY[name]
                patch.setattr(module, name, lambda _, answer=answer: answer)


def _forget(modules: tuple[ModuleType, ...]) -> None:
    """Forget what was compiled of their kernels."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()


def weight_of(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
