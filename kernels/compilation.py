"""Counts kernels compiled in this process, so that "nothing compiles after ready" can be tested.

Every launch of a Triton kernel with a combination of types and constants not seen before compiles
and stalls the step. Kernels keep that number small: sizes that vary are `do_not_specialize`, what
is constant for a model is `tl.constexpr`, and warm-up runs each combination.
"""

from importlib.util import find_spec


class CompilationCounter:
    """Records the Triton kernels that were built or loaded since `install` or `reset`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def install(self) -> None:
        """Start counting; without Triton there is nothing to count."""
        if find_spec("triton") is None:
            return
        import triton

        def note(**event: object) -> None:
            self.names.append(str(event.get("repr", event.get("key", "kernel"))))

        triton.knobs.runtime.jit_post_compile_hook = note

    def reset(self) -> None:
        """Start at none."""
        self.names.clear()
