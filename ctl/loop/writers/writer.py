"""The base class of writers of logged values."""

from collections.abc import Iterator, Mapping
import dataclasses
import time
from typing import Any

TRAIN = "train"
_MAX_ELEMENTS = 100  # of a list that is logged element by element


@dataclasses.dataclass(frozen=True)
class Record:
    """The values that are logged at one step.

    Attributes:
        split: "train" for an inner loop, "eval" or the name of a dataset for an evaluation.
        step: the global step, the one axis of all writers.
        values: name -> number; mappings and lists may be nested.
        time: seconds since 1970.
    """

    split: str
    step: int
    values: Mapping[str, Any]
    time: float = dataclasses.field(default_factory=time.time)

    def numbers(self) -> dict[str, int | float]:
        """Returns the numbers by name; numbers in mappings and lists are named "outer/inner"."""
        return dict(_flatten(self.values, ""))


class Writer:
    """Writes the records of a run. Only the chief has writers.

    class Printer(Writer):
        def write(self, record):
            print(record.split, record.step, record.numbers())
    """

    # An error of a writer that is not required, such as of a server, only prints a line.
    required = True
    title = ""  # what it writes, for the message if that fails; by default its path or its class

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Prepares the writer; called once a training run owns its folder.

        Args:
            config: the resolved config, as nested mappings.
            is_new: whether the run begins, and does not resume.
        """

    def write(self, record: Record) -> None:
        """Writes a record."""
        raise NotImplementedError

    def restore(self, step: int) -> None:
        """Drops the records after a step, which the run is going to compute again."""

    def has_evaluation(self, step: int) -> bool:
        """Returns whether a step has a record of an evaluation; True if the writer does not know."""
        return True

    def close(self, status: str) -> None:
        """Ends the run.

        Args:
            status: "FINISHED", or "KILLED" if the run is going to be resumed.
        """


def _flatten(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple) and len(value) <= _MAX_ELEMENTS:
        for index, item in enumerate(value):
            yield from _flatten(item, f"{name}/{index}")
    elif isinstance(value, int | float):
        yield name, value
