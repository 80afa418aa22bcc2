"""Compares the variables of two checkpoints."""

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.loop.checkpoints.matching import CheckpointContent, Variable


def compare_checkpoints(a: str, b: str) -> tuple[int, int, list[str]]:
    """Compares two checkpoints, given by the prefixes of their files.

    Returns:
        The number of variables, the number of those that differ, and lines about them: one about all
        whose shapes or dtypes differ, then one for each of the others, slot variables last. Lines are
        sorted by the largest difference of an element, relative to the variable's largest value.

    Raises:
        UsageError: a checkpoint cannot be read.
    """
    first, second = _read(a), _read(b)
    lines: list[tuple[bool, float, str]] = []
    changes: list[str] = []
    for key in dict.fromkeys([*first, *second]):
        if key not in first or key not in second:
            variable = (first.get(key) or second[key])[0]
            only = f"{variable.name}: only in {a if key in first else b}"
            lines.append((variable.slot, np.inf, only))
            continue
        (variable, old), (_, new) = first[key], second[key]
        old, new = np.asarray(old), np.asarray(new)
        if old.shape != new.shape or old.dtype != new.dtype:
            change = f"{list(old.shape)} {old.dtype} -> {list(new.shape)} {new.dtype}"
            changes.append(f"{variable.name}: {change}")
            continue
        difference = _compare(variable.name, old, new)
        if difference:
            lines.append((variable.slot, *difference))
    lines.sort(key=lambda line: (line[0], -line[1]))
    texts = [text for *_, text in lines]
    if changes:
        more = f"{len(changes)} variables have another shape or dtype, such as "
        texts.insert(0, more * (len(changes) > 1) + changes[0])
    return len({*first, *second}), len(lines) + len(changes), texts


def _read(path: str) -> dict[str, tuple[Variable, Any]]:
    """Returns each variable and its value, by its place in the trainer."""
    try:
        content = CheckpointContent(path)
        # Keyed by place, since Keras numbers layer names per process.
        return {str(v.source): (v, content.value(v)) for v in content.variables}
    except (ValueError, IndexError, tf.errors.OpError) as error:  # IndexError: a file cut short
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} cannot be read ({reason}): name another checkpoint.") from None


def _compare(name: str, old: Any, new: Any) -> tuple[float, str] | None:
    old, new = np.asarray(old), np.asarray(new)
    if old.dtype.kind in "OSU":  # the bytes of an array of strings are addresses
        return None if np.array_equal(old, new) else (np.inf, f"{name}: another value")
    if old.tobytes() == new.tobytes():
        return None
    differs = (_bytes(old) != _bytes(new)).any(axis=1)
    wide, other = ((_widen(value).ravel())[differs] for value in (old, new))
    finite = np.isfinite(wide) & np.isfinite(other)
    distance = _distance(old.ravel()[differs][finite], new.ravel()[differs][finite])
    scale = max(_largest(old), _largest(new))
    relative = distance / scale if distance else 0.0
    order = relative if finite.all() else np.inf
    if old.size == 1:
        return order, f"{name}: {old.item()} -> {new.item()}"
    size = f"largest difference {distance:.2g} ({relative:.2g} times the largest value of this variable)"
    if not distance and finite.all():
        size = "the same values, but other bits, such as the sign of 0"
    counted = f"{len(wide)} of {old.size} elements differ"
    infinite = len(wide) - int(finite.sum())
    ending = f", {infinite} of them by a value that is not finite" if infinite else ""
    return order, f"{name}: {size}; {counted}{ending}"


def _bytes(value: np.ndarray) -> np.ndarray:
    """Returns one row of bytes for each element."""
    return np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8)


def _widen(value: np.ndarray) -> np.ndarray:
    # NumPy's functions do not support bfloat16.
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)


def _distance(old: np.ndarray, new: np.ndarray) -> float:
    """Returns the largest difference of finite elements; 0 if there are none."""
    if old.dtype.kind in "iub":
        # float64 has 53 bits only, and the distance of two numbers of int64 needs 64.
        high, low = (pick(old, new).astype(np.uint64) for pick in (np.maximum, np.minimum))
        return float((high - low).max(initial=0))
    return float(np.abs(_widen(new) - _widen(old)).max(initial=0.0))


def _largest(value: np.ndarray) -> float:
    """Returns the largest absolute value of the finite elements."""
    magnitude = np.abs(_widen(value))
    return float(magnitude[np.isfinite(magnitude)].max(initial=0.0))
