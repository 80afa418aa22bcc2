"""ctl diff A B: lists what differs between two runs, or between two checkpoints.

    ctl diff runs/a runs/b
    ctl diff runs/a/checkpoints/ckpt-100 runs/b/checkpoints/ckpt-100

The exit code is 0 if nothing differs, 1 if something does, and 2 for a mistake of the user, such as two
runs without a common step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

from ctl.commands import Parser, run_files
from ctl.commands.run_files import SPEED, RunFiles
from ctl.errors import UsageError, print_line, show_value
from ctl.hardware import installation
from ctl.loop.checkpoints.files import find_files
from ctl.loop.store import fetch

_AXES = ("time", "split", "step")
_MAX_METRICS = 8

JsonObject = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SubjectComparison:
    """The comparison of two runs in one subject.

    Attributes:
        name: the subject, such as "config".
        summary: the result.
        lines: the differences.
        differs: whether there are differences, or results that only one of the two has.
        compared: whether both have results of this subject to compare.
    """

    name: str
    summary: str
    lines: tuple[str, ...] = ()
    differs: bool = False
    compared: bool = False


def compare_runs(a: RunFiles, b: RunFiles) -> list[SubjectComparison]:
    """Compares the configs, skipped batches, versions, hardware and metrics of two runs."""
    return [
        _compare_values("config", {**a.config, **a.skipped}, {**b.config, **b.skipped}, "key"),
        *_compare_results(a, b),
        _compare_metrics(a, b),
    ]


def _differing(a: JsonObject, b: JsonObject) -> list[str]:
    """Returns the keys whose values differ, or that only one of the two has."""
    return [
        key
        for key in dict.fromkeys([*a, *b])
        if not _same(a.get(key), b.get(key)) or (key in a) != (key in b)
    ]


def _show(values: JsonObject, key: str) -> str:
    return show_value(values[key]) if key in values else "not set"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        # Compares bits: 0.0 differs from -0.0, and NaN, of which JSON has only one, equals NaN.
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def _compare_values(name: str, a: JsonObject, b: JsonObject, noun: str) -> SubjectComparison:
    lines = tuple(f"{key}: {_show(a, key)} -> {_show(b, key)}" for key in _differing(a, b))
    if not lines:
        return SubjectComparison(name, "the same")
    summary = f"{len(lines)} {noun}{'s' * (len(lines) > 1)} differ{'s' * (len(lines) == 1)}"
    return SubjectComparison(name, summary, lines, differs=True)


def _compare_results(a: RunFiles, b: RunFiles) -> Iterator[SubjectComparison]:
    without = [run.name for run in (a, b) if not run.result]
    for name in ("versions", "hardware"):
        if without:
            yield SubjectComparison(
                name, f"unknown: {' and '.join(without)} has no result.json yet"
            )
            continue
        first, second = (
            run.result.get("versions") or {} if name == "versions" else _hardware(run.result)
            for run in (a, b)
        )
        yield _compare_values(name, first, second, "value")


def _hardware(result: JsonObject) -> JsonObject:
    own = {key: result.get(key) for key in ("strategy", "replicas")}
    return own | dict(result.get("host") or {})


def _compare_metrics(a: RunFiles, b: RunFiles) -> SubjectComparison:
    first, second = ({_key(record): record for record in run.metrics} for run in (a, b))
    common = sorted({*first} & {*second}, key=lambda key: (key[1], key[0]))
    lines: list[str] = []
    where, last_same = "", 0
    for split, step in common:
        old, new = _values(first[split, step]), _values(second[split, step])
        differences = [_describe(name, old, new) for name in _differing(old, new)]
        if differences:
            where = f"first difference at step {step} ({split})"
            lines += differences[:_MAX_METRICS]
            more = len(differences) - _MAX_METRICS
            lines += [f"and {more} more"] * (more > 0)
            break
        last_same = step
    lines += _unmatched(a, b, first, second)
    counted = f"{len(common)} records of both runs"
    if where:
        first_common = ", the first step of which both have records"
        summary = where + (f"; the same up to step {last_same}" if last_same else first_common)
    elif common:
        summary = f"the same in {counted}, up to step {common[-1][1]}"
    else:
        summary = "not compared: no step has records of both runs"
    return SubjectComparison("metrics", summary, tuple(lines), bool(lines), compared=bool(common))


def _unmatched(
    a: RunFiles, b: RunFiles, first: Mapping[Any, Any], second: Mapping[Any, Any]
) -> Iterable[str]:
    """Yields a line about each run that has records which the other lacks."""
    for run, records, others in ((a, first, second), (b, second, first)):
        only = sorted(step for split, step in records.keys() - others.keys())
        if only:
            steps = f"step {only[0]}" if len({*only}) == 1 else f"steps {only[0]} to {only[-1]}"
            yield f"only in {run.name}: {len(only)} record{'s' * (len(only) > 1)} of {steps}"


def _key(record: JsonObject) -> tuple[str, int]:
    return str(record.get("split")), int(record.get("step", 0))


def _values(record: JsonObject) -> dict[str, Any]:
    """Returns the metrics of a record that do not measure the machine."""
    return {k: v for k, v in record.items() if k not in _AXES and not k.startswith(SPEED)}


def _describe(name: str, old: JsonObject, new: JsonObject) -> str:
    text = f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
    values = [values[name] for values in (old, new) if isinstance(values.get(name), int | float)]
    if len(values) == 2:
        scale = max(map(abs, values))
        if math.isfinite(scale) and scale:
            text += f" (by {abs(values[1] - values[0]) / scale:.2g} of its value)"
    return text


_MAX_LINES = 10  # about variables
_FORM = "ctl diff A B, where each is the workdir of a run, or a checkpoint"


def main(arguments: Sequence[str]) -> int:
    """Prints what differs; returns 0 if nothing does, else 1.

    Raises:
        UsageError: an argument is wrong, a file is damaged, or the two have no result to compare.
    """
    parser = Parser("ctl diff", _FORM, __doc__)
    parser.add_argument("a", metavar="A", help="the workdir of a run, or a checkpoint")
    parser.add_argument("b", metavar="B", nargs="?", help="what to compare it with")
    values = parser.parse_args(list(arguments))
    if values.b is None:
        raise UsageError("ctl diff needs two runs or checkpoints: ctl diff A B.")
    names = [fetch(values.a), fetch(values.b)]
    for name in names:
        _check(name)
    sections = []
    if all((pathlib.Path(name) / "config.json").exists() for name in names):
        sections += compare_runs(*run_files.read_runs(names))
    sections.append(_compare_weights(*names))
    for section in sections:
        print_line(f"{section.name:<11} {section.summary}")
        for line in section.lines:
            print_line(f"  {line}")
    if not any(section.compared for section in sections):
        raise UsageError(
            f"No result of {values.a} and {values.b} was compared: they have neither records of metrics "
            "nor checkpoints of the same step. Train both up to the same step, or name two checkpoints."
        )
    return int(any(section.differs for section in sections))


def _check(name: str) -> None:
    path = pathlib.Path(name)
    is_run = (path / "config.json").exists() or find_files(name).steps()
    if not is_run and not pathlib.Path(f"{name}.index").exists():
        wrong = "is neither the workdir of a run nor a checkpoint"
        raise UsageError(
            f"{name} {wrong if path.exists() else 'does not exist'}: name a run's --workdir, or the "
            "files of a checkpoint without their ending, such as runs/mine/checkpoints/ckpt-500."
        )


def _compare_weights(a: str, b: str) -> SubjectComparison:
    pairs = _pair_checkpoints(a, b)
    if not pairs:
        listed = [", ".join(map(str, find_files(n).steps())) or "none" for n in (a, b)]
        steps = ", ".join(f"{name}: {text}" for name, text in zip((a, b), listed, strict=True))
        summary = f"not compared, since no step has two checkpoints ({steps})"
        return SubjectComparison("weights", summary, differs=listed != ["none", "none"])
    installation.prepare_import()
    from ctl.commands import checkpoint_comparison

    same: list[str] = []
    steps = ", ".join(label.rpartition(" ")[2] for label, *_ in pairs)
    why = f", the first difference (both have checkpoints of the steps {steps})"
    if len(pairs) == 1:
        why = ", the only step of which both have a checkpoint"
    for label, first, second in pairs:
        variables, count, lines = checkpoint_comparison.compare_checkpoints(first, second)
        if lines:
            before = f"the same {same[-1]}; " if same else ""
            differing = f"{count} of {variables} variables differ {label}"
            differing += why * label.startswith("at step")
            more = [f"and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)
            shown = (*lines[:_MAX_LINES], *more)
            return SubjectComparison(
                "weights", f"{before}{differing}", shown, differs=True, compared=True
            )
        same.append(label)
    return SubjectComparison("weights", f"the same bits {', '.join(same)}", compared=True)


def _pair_checkpoints(a: str, b: str) -> list[tuple[str, str, str]]:
    """Returns a label and the paths of the checkpoints to compare, in the order of their steps."""
    folders = [os.path.isdir(name) for name in (a, b)]
    if all(folders):
        first, second = find_files(a), find_files(b)
        common = sorted({*first.steps()} & {*second.steps()})
        return [(f"at step {step}", first.path(step), second.path(step)) for step in common]
    paths: list[str] = []
    for name, is_folder in zip((a, b), folders, strict=True):
        steps = find_files(name).steps() if is_folder else []
        if is_folder and not steps:
            return []
        paths.append(find_files(name).path(steps[-1]) if is_folder else name)
    return [(f"between {paths[0]} and {paths[1]}", paths[0], paths[1])]
