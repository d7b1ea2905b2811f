"""Keeps what Triton's interpreter computes again and again, and leaves out what nobody reads.

The results are the same, in less than half of the time. The names changed here are private to
Triton, whose version constraints.txt pins.
"""

import math
from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any


def spare_work() -> None:
    """Change the interpreter of this process."""
    _patch_once()
    _keep_dtypes()
    _keep_block_types()
    _keep_shapes()
    _compare_themselves_at_once()
    _leave_equal_shapes()
    _look_for_no_overflow()


def _patch_once() -> None:
    """Let functions that a kernel calls find Triton's language as the kernel's launch left it.

    Triton looks through all of its names again for each such call, in which there is nothing left
    to change: a quarter of the time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules = (language, language.core)

    @lru_cache
    def seen_by(fn: Any) -> list[Any]:
        known = [value for value in fn.__globals__.values() if isinstance(value, ModuleType)]
        return [module for module in modules if module in known]

    def patch_lang(fn: Any) -> Any:
        is_patched = not any(language.core.is_builtin(module.load) for module in seen_by(fn))
        return None if is_patched else patch(fn)

    interpreter._patch_lang = patch_lang


def _keep_dtypes() -> None:
    """Keep NumPy's type of each of Triton's: a tenth of the time goes to a table made each time."""
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    kept: dict[str, Any] = {}  # by a name that has the shape of a block, too

    def kept_or_found(dtype: Any) -> Any:
        if dtype.name not in kept:
            kept[dtype.name] = find(dtype)
        return kept[dtype.name]

    interpreter._get_np_dtype = kept_or_found


def _keep_block_types() -> None:
    """Make one type for each shape and type of elements: each operation makes several."""
    from triton.language import core

    initialize = core.block_type.__init__
    unwrap = core._unwrap_if_constexpr
    kept: dict[tuple[Any, ...], Any] = {}

    def kept_or_made(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (element_ty.name, *map(unwrap, shape))
        if key not in kept:
            made = object.__new__(cls)
            initialize(made, element_ty, shape)
            kept[key] = made
        return kept[key]

    core.block_type.__new__ = kept_or_made
    core.block_type.__init__ = lambda self, element_ty, shape: None


def _keep_shapes() -> None:
    """Give tensors of one type the same shape, which no operation changes."""
    from triton.language import core

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(math.prod(sizes))

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = initialize


def _compare_themselves_at_once() -> None:
    """Compare no names of a type with its own."""
    from triton.language import core

    is_equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def _leave_equal_shapes() -> None:
    """Look for no common shape of two tensors that have the same."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _look_for_no_overflow() -> None:
    """Compute no sum and product in int64 for an assertion that only `debug` would make."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
