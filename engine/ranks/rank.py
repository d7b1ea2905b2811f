"""Names one of the ranks that share a model, and computes its part of a length.

share         equal parts; parts of whole units (heads), repeated where ranks outnumber them
padded_share  equal parts but for the last ones, which may be shorter or empty
"""

from dataclasses import dataclass

from engine.errors import ConfigError

SIZE_KEY = "workers.tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `size` ranks that share a model."""

    index: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.index} of {self.size}"

    def share(self, length: int, what: str, unit: int | None = None) -> slice:
        """This rank's part of [0, length).

        unit: length of what no rank holds in part; of fewer units than ranks, several ranks hold
        the same one. None = no part is repeated. Raises ConfigError if equal parts are impossible.
        """
        num_units = length // (unit or 1)
        if num_units % self.size == 0:
            num_own = length // self.size
            return slice(self.index * num_own, (self.index + 1) * num_own)
        if unit is not None and self.size % num_units == 0:
            first = self.index * num_units // self.size
            return slice(first * unit, (first + 1) * unit)
        raise ConfigError(
            f"{SIZE_KEY}: {self.size} ranks cannot share {num_units} {what} equally; set it to a"
            " size that divides them"
        )

    def padded_share(self, length: int) -> slice:
        """This rank's part of [0, length), at most `padded_length` long."""
        num_padded = self.padded_length(length)
        start = min(self.index * num_padded, length)
        return slice(start, min(start + num_padded, length))

    def padded_length(self, length: int) -> int:
        """The length to which every rank's `padded_share` is padded."""
        return -(-length // self.size)


WHOLE_MODEL = Rank(0, 1)
