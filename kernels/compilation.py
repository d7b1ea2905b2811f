"""Counts kernels compiled in this process, so that "nothing compiles after ready" can be tested.

The first launch of a Triton kernel with a new combination of types and constants compiles it and
stalls the step. Kernels keep the number of combinations small: sizes that vary are
`do_not_specialize`, constants of a model are `tl.constexpr`, and warm-up runs each combination.
"""

from importlib.util import find_spec


class CompilationCounter:
    """Names of the Triton kernels built or loaded since `install` or `reset`."""

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
        """Set the count to zero."""
        self.names.clear()
