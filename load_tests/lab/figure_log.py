"""Figures as they come: a run that is cut short leaves what it had measured until then."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from load_tests.lab.comparison import Comparison
from load_tests.tables import Figure

logger = logging.getLogger(__name__)


class FigureLog:
    """Says each figure at once, in the log and in a file: one JSON object a line."""

    def __init__(self, path: Path | None) -> None:
        """path: a file, which is begun anew; None = the log alone."""
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def add(self, figure: Figure) -> None:
        logger.info("%s: %.4g %s", figure.name, figure.value, figure.unit)
        self._write(asdict(figure))

    def add_work(self, one: Comparison) -> None:
        logger.info("%s: %.4g %s", one.work.key, one.value, one.work.kind.value)
        self._write({"name": one.work.key, **one.to_builtins()})

    def _write(self, line: dict[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
