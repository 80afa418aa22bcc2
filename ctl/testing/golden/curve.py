"""A recorded curve and its file."""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

from ctl.errors import UsageError
from ctl.loop import json_files

_FORMAT = 2
_ABOUT = "Recorded by ctl.testing.assert_curve; do not edit. Record again: pytest --update_golden"


@dataclasses.dataclass(frozen=True)
class Step:
    """The values that one step computed. The lists have one item for each tensor of the curve.

    Attributes:
        loss: the loss of the global batch; NaN if the trainer's loop reports none.
        update: the norms of the changes of the tensors.
        bits: hashes of the tensors after the step.
        other_bits: a hash of all other variables, such as the slots of the optimizer.
        batch: a hash of each feature of the global batch, by name; {} if it cannot be read.
        loss_tolerance, tolerance: how far the loss and each update may differ where bits cannot be
            compared; measured by `recording.py`.
    """

    loss: float
    update: list[float]
    bits: list[str]
    other_bits: str
    batch: Mapping[str, str]
    loss_tolerance: float = 0.0
    tolerance: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The steps of a training run, and what their bits depend on.

    Attributes:
        environment: versions, CPU, devices, strategy, and the options of the trainer and its optimizer.
        repeatable: whether a second run on the same machine computed the same bits.
        tensors: the trainable variables and moving statistics, name -> shape.
        steps: the steps, from the first.
    """

    environment: Mapping[str, str]
    repeatable: bool
    tensors: Mapping[str, list[int]]
    steps: list[Step]


def read(path: pathlib.Path) -> Curve:
    """Reads a golden file.

    Raises:
        UsageError: the file is damaged, or was written by another version of ctl.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError(f"format {_FORMAT} is required")
        content.pop("about")
        steps = [Step(**step) for step in content.pop("steps")]
        return Curve(steps=steps, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} cannot be read as a golden curve ({error!r}): restore it, or record it again by "
            "pytest --update_golden."
        ) from None


def write(path: pathlib.Path, curve: Curve) -> None:
    """Writes a golden file, one line per step, completely or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    content: dict[str, Any] = {"format": _FORMAT, "about": _ABOUT, **dataclasses.asdict(curve)}
    steps = ",\n".join(f"    {json.dumps(step)}" for step in content.pop("steps"))
    head = json.dumps(content, indent=2).removesuffix("\n}")
    temporary = path.with_name(json_files.temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f'{head},\n  "steps": [\n{steps}\n  ]\n}}\n', encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}).") from None
