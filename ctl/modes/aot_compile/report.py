"""What was found for each slice, as a table for people and as JSON for programs."""

from collections.abc import Sequence
import json
import os
import pathlib
import tempfile
from typing import Any

from ctl.modes.aot_compile.compiling import Compiled
from ctl.modes.aot_compile.survey import Outcome

LIMITS = (
    "What compiles and fits need not be fast, and no figure was compared with a physical TPU "
    "(docs/aot.md)."
)
_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_NO_PROGRAM = Compiled()
_HEADER = ("slice", "cores", "HBM a core", "result", "peak", "of HBM", "arguments", "temporaries")
_COSTS = ("Gflop", "GiB moved", "flop/byte", "all-reduces", "compile")


def table(outcomes: Sequence[Outcome]) -> str:
    """A row a slice and program, then what is wrong, each once."""
    rows: list[tuple[str, ...]] = [(*_HEADER, *_COSTS)]
    for outcome in outcomes:
        programs = outcome.programs or {"": _NO_PROGRAM}
        rows += [_row(outcome, name, found) for name, found in programs.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        [*(line.rstrip() for line in lines), *_batches(outcomes), *_problems(outcomes)]
    )


def record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What aot_compile.json holds: the train step's figures, the eval step's under `eval`."""
    return {"topologies": [_entry(outcome) for outcome in outcomes]}


def write(outcomes: Sequence[Outcome], folder: pathlib.Path) -> pathlib.Path:
    """Writes aot_compile.json, whole or not at all; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "aot_compile.json"
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(record(outcomes), file, indent=2)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def _row(outcome: Outcome, name: str, found: Compiled) -> tuple[str, ...]:
    slice_ = outcome.slice
    about = (slice_.name, str(slice_.cores), f"{slice_.hbm_bytes / _GIB:.2f} GiB")
    if found is _NO_PROGRAM:
        return (*about, "would not run", *[""] * (len(_HEADER) + len(_COSTS) - 4))
    if found.error:
        wrong = "out of HBM" if found.out_of_memory else "does not compile"
        return (*about, f"{name}: {wrong}", *[""] * (len(_HEADER) + len(_COSTS) - 4))
    return (
        *about,
        f"{name} compiles",
        _size(found.peak_bytes),
        f"{found.peak_bytes / slice_.hbm_bytes:.1%}",
        _size(found.argument_bytes),
        _size(max(0, found.peak_bytes - found.argument_bytes)),
        f"{found.flops / 1e9:,.2f}",
        f"{found.bytes / _GIB:,.3f}",
        f"{_intensity(found):.1f}",
        f"{found.all_reduces}, {_size(found.all_reduce_bytes)}",
        f"{found.seconds:.1f} s{' (twice)' * (found.effort == 0)}",
    )


def _batches(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"{o.slice.name}: the largest global batch that fits is {o.largest_batch:,}, to within 1/16."
        for o in outcomes
        if o.largest_batch
    ]


def _problems(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        for problem in outcome.problems:
            lines.append(f"{'error' if problem.fatal else 'warning'}: {problem}")
    return list(dict.fromkeys(lines))


def _entry(outcome: Outcome) -> dict[str, Any]:
    train = outcome.programs.get("train step", _NO_PROGRAM)
    fatal = [str(problem) for problem in outcome.problems if problem.fatal]
    return {
        "topology": outcome.slice.name,
        "cores": outcome.slice.cores,
        "hosts": outcome.slice.hosts,
        "global_batch_size": outcome.global_batch_size,
        "compiled": outcome.compiled,
        **_figures(train),
        "hbm_bytes": outcome.slice.hbm_bytes,
        "seconds": outcome.seconds,
        "error": "; ".join(fatal) or None,
        "warnings": [str(problem) for problem in outcome.problems if not problem.fatal],
        "largest_global_batch_size": outcome.largest_batch or None,
        "eval": _figures(outcome.programs.get("eval step", _NO_PROGRAM)),
    }


def _figures(found: Compiled) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_bytes or None,
        "argument_bytes": found.argument_bytes,
        "flops": found.flops,
        "bytes": found.bytes,
        "all_reduces": found.all_reduces,
        "all_reduce_bytes": found.all_reduce_bytes,
        "compile_seconds": found.seconds,
    }


def _intensity(found: Compiled) -> float:
    return found.flops / found.bytes if found.bytes else 0.0


def _size(number: float) -> str:
    for unit, name, digits in ((_GIB, "GiB", 2), (_MIB, "MiB", 1), (_KIB, "KiB", 1)):
        if number >= unit:
            return f"{number / unit:.{digits}f} {name}"
    return f"{number:.0f} B"
