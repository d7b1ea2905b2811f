"""What EAGLE-3 heads and MTP layers have in common: a layer that reads a vector of each token.

The vector is made by the target, or stands in for what the target has not computed. Where it lies
is told when the stores are built (`engine.kv.features`).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.layers.attention import SelfAttention
from engine.layers.decoder import DecoderLayer
from engine.layers.mlp import FeedForward
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow
from engine.models.llama import CausalLM, Export
from engine.models.spec import ModelSpec


class ReadsFeatures(Protocol):
    """One vector a token; see `engine.kv.features.FeaturePlanes`."""

    def read(self, slots: Tensor) -> Tensor:
        """slots: [T] integer; returns [T, width]."""
        ...


class FeatureLayer(DecoderLayer):
    """A layer whose input is a token's embedding and a vector of the token before it."""

    __slots__ = ("_features",)

    def __init__(
        self,
        *,
        attention_norm: RmsNorm,
        attention: SelfAttention,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
    ) -> None:
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self._features: ReadsFeatures | None = None

    def read_from(self, features: ReadsFeatures) -> None:
        self._features = features

    @property
    def can_store_alone(self) -> bool:
        return False

    def _read(self, flow: Flow) -> Tensor:
        """[T, width]  the vectors beside the flow's tokens."""
        assert self._features is not None, "the head was not told where its input is"
        return self._features.read(flow.ctx.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureHead:
    """A head in memory."""

    spec: ModelSpec  # of the whole head, as a model of one layer
    model: CausalLM  # its input are tokens 1, 2, ... of a request, at the positions 0, 1, ...
    layer: FeatureLayer
    export: Export  # what the target has to export
    width: int  # of a vector

    def read_from(self, features: ReadsFeatures) -> None:
        """Where the head finds the vector of each entry; before its first step."""
        self.layer.read_from(features)
