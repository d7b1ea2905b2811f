"""Masks: which keys a query of a layer sees, by their positions in one sequence.

All masks are causal: a prompt may be computed in chunks, and later keys do not exist yet. Besides,
a layer may see a window of keys, or the keys of its own chunk of the sequence (as every fourth
layer of Llama 4 does not), and a configuration may name a function that takes keys away.

    seen(q, k) = first_key(q) <= k <= q  and  function(q, k)
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.names import BackendUnavailable

# (query, key) -> whether the query sees the key: int positions in, bool out, elementwise.
PositionTest = Callable[[Tensor, Tensor], Tensor]
_SAMPLE_POSITIONS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFunction:
    """A mask function of the configuration."""

    name: str  # module:function
    test: PositionTest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMask:
    """The mask of one layer; None = no such limit."""

    window: int | None = None  # a query sees itself and the window - 1 keys before it
    chunk: int | None = None  # a query sees keys from the last multiple of `chunk` on
    function: MaskFunction | None = None

    def first_keys(self, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that each query may see; those from it to the query are candidates."""
        first = np.zeros_like(queries)
        if self.window is not None:
            first = np.maximum(first, queries - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, queries // self.chunk * self.chunk)
        return first

    def seen(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [len(queries), len(keys)]; both are positions."""
        q, k = queries[:, None], keys[None, :]
        is_seen = (k >= self.first_keys(queries)[:, None]) & (k <= q)
        if self.function is not None:
            allowed = self.function.test(torch.from_numpy(q), torch.from_numpy(k))
            is_seen &= allowed.numpy()
        return is_seen


def load_mask_function(name: str, max_positions: int) -> MaskFunction:
    """The function `module:function` of this installation, checked at all positions it may meet.

    Imports the module, which runs its code: `name` must come from the operator's configuration.
    Raises BackendUnavailable if there is no such function, or if it is no mask.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        test = getattr(module, function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BackendUnavailable(f"mask {name}: {error}; expected module:function") from error
    problem = _problem(test, max_positions)
    if problem is not None:
        raise BackendUnavailable(f"mask {name}: {problem}")
    return MaskFunction(name=name, test=test)


def _problem(test: PositionTest, max_positions: int) -> str | None:
    """Why `test` cannot be a mask; None = it can."""
    positions = torch.arange(max_positions)
    some = positions[:_SAMPLE_POSITIONS]
    try:
        square, own = test(some[:, None], some[None, :]), test(positions, positions)
        singles = [[bool(test(q, k)) for k in some] for q in some]
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        return f"it raised {type(error).__name__}: {error}"
    for result, shape in ((square, (len(some), len(some))), (own, (max_positions,))):
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.shape != shape:
            return "given int tensors of positions, it must return a bool tensor of their shape"
    if not bool(own.all()):
        blind = int((~own).nonzero()[0])
        return f"the query at position {blind} does not see its own key; every query must"
    if square.tolist() != singles:
        return "it is not elementwise: single positions give other results than many at once"
    return None
