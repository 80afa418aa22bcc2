"""Compares the variables of two checkpoints."""

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.loop.checkpoints.matching import CheckpointContent, Variable


def compare_checkpoints(a: str, b: str) -> tuple[int, list[str]]:
    """Compares two checkpoints, given by the prefixes of their files.

    Returns:
        The number of variables, and one line for each that differs, slots last, by the largest
        difference of an element relative to the variable's largest element.

    Raises:
        UsageError: a checkpoint cannot be read.
    """
    first, second = _read(a), _read(b)
    lines: list[tuple[bool, float, str]] = []
    for key in dict.fromkeys([*first, *second]):
        if key not in first or key not in second:
            variable = (first.get(key) or second[key])[0]
            only = f"{variable.name}: only in {a if key in first else b}"
            lines.append((variable.slot, np.inf, only))
            continue
        (variable, old), (_, new) = first[key], second[key]
        difference = _compare(variable.name, old, new)
        if difference:
            lines.append((variable.slot, *difference))
    lines.sort(key=lambda line: (line[0], -line[1]))
    return len({*first, *second}), [text for *_, text in lines]


def _read(path: str) -> dict[str, tuple[Variable, Any]]:
    """Returns each variable and its value, by its place in the trainer."""
    try:
        content = CheckpointContent(path)
        # By place, since Keras numbers the names of layers by process.
        return {str(v.source): (v, content.value(v)) for v in content.variables}
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} cannot be read ({reason}): name another checkpoint.") from None


def _compare(name: str, old: Any, new: Any) -> tuple[float, str] | None:
    old, new = np.asarray(old), np.asarray(new)
    if old.shape != new.shape or old.dtype != new.dtype:
        change = f"{list(old.shape)} {old.dtype} -> {list(new.shape)} {new.dtype}"
        return np.inf, f"{name}: {change}"
    if old.tobytes() == new.tobytes():
        return None
    if old.dtype.kind not in "fiub" and not np.issubdtype(old.dtype, np.number):
        return np.inf, f"{name}: another value"
    wide, other = old.astype(np.float64), new.astype(np.float64)
    differing = int((wide != other).sum())
    distance = float(np.abs(other - wide).max(initial=0.0))
    relative = distance / max(float(np.abs(wide).max(initial=0.0)), 1e-300)
    if wide.size == 1:
        return relative, f"{name}: {old.item()} -> {new.item()}"
    return relative, (
        f"{name}: largest difference {distance:.2g}, {relative:.2g} of the largest element; "
        f"{differing} of {wide.size} elements differ"
    )
