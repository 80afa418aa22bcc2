"""JsonLinesWriter: writes logged values to metrics.jsonl."""

from collections.abc import Callable, Iterator
import contextlib
import json
import math
import pathlib
from typing import Any

from ctl.loop import json_files
from ctl.loop.writers.writer import TRAIN, Record, Writer

NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as JSON has no such numbers
_RESERVED = ("time", "split", "step")
SeriesKey = tuple[str, int]


class JsonLinesWriter(Writer):
    """Appends one JSON object per record: time, split, step, and the values by name.

    NaN and infinity, which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity". Each
    step of a split has one record in the file, however often a run is killed. A record
    is in the file when `write` returns. `restore` drops what a killed process wrote after the restored
    checkpoint, and a repeated evaluation replaces the earlier one.

    Args:
        workdir: the folder of the run.
    """

    def __init__(self, workdir: pathlib.Path):
        self.path = workdir / "metrics.jsonl"
        self._evaluations: set[SeriesKey] | None = None  # those in the file; None: not read yet

    def write(self, record: Record) -> None:
        """Appends a record, completely or not at all."""
        key = (record.split, record.step)
        if record.split != TRAIN:
            if key in self._read_evaluations():
                self._keep_lines(lambda other: other != key)
            self._read_evaluations().add(key)
        line: dict[str, Any] = {"time": record.time, "split": record.split, "step": record.step}
        for name, value in record.numbers().items():
            line[f"metric/{name}" if name in _RESERVED else name] = _as_json(value)
        json_files.append_text(self.path, json.dumps(line) + "\n")

    def restore(self, step: int) -> None:
        """Drops the records after a step, and a last line that a kill cut short."""
        self._keep_lines(lambda key: key[1] <= step)
        self._evaluations = None

    def has_evaluation(self, step: int) -> bool:
        """Returns whether the file has a record of an evaluation at a step."""
        return any(key[1] == step for key in self._read_evaluations())

    def _read_lines(self) -> Iterator[tuple[str, SeriesKey]]:
        if self.path.exists():
            with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
                for line in file:
                    if line.endswith("\n") and (key := _read_key(line)):
                        yield line, key

    def _read_evaluations(self) -> set[SeriesKey]:
        if self._evaluations is None:
            self._evaluations = {key for _, key in self._read_lines() if key[0] != TRAIN}
        return self._evaluations

    def _keep_lines(self, keep: Callable[[SeriesKey], bool]) -> None:
        if self.path.exists():
            kept = (line for line, key in self._read_lines() if keep(key))
            json_files.replace_text(self.path, kept)


def _read_key(line: str) -> SeriesKey | None:
    """Returns the split and step of a line; None if it is not a complete one."""
    with contextlib.suppress(ValueError):
        content = json_files.parse(line, split=str, step=int)
        return content["split"], content["step"]
    return None


def _as_json(value: int | float) -> int | float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
