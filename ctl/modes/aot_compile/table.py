"""Prints the results of all slices as a table, and writes them as JSON."""

from collections.abc import Sequence
import pathlib
from typing import Any

from ctl.errors import align
from ctl.loop import json_files
from ctl.modes.aot_compile.compiler_process import Compiled
from ctl.modes.aot_compile.survey import SliceResult

DISCLAIMER = (
    "A step that compiles and fits need not be fast, and no figure was compared with a physical TPU "
    "(docs/aot.md)."
)
_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_NO_PROGRAM = Compiled()
_HEADER = ("slice", "cores", "HBM per core", "result", "peak", "of HBM", "arguments", "temporaries")
_COSTS = ("Gflop", "GiB moved", "flop/byte", "all-reduces", "compile")


def format_table(results: Sequence[SliceResult]) -> str:
    """Formats one row per slice and program, then the largest batches and the problems."""
    rows: list[tuple[str, ...]] = [(*_HEADER, *_COSTS)]
    for result in results:
        programs = result.programs or {"": _NO_PROGRAM}
        rows += [_format_row(result, name, compiled) for name, compiled in programs.items()]
    return "\n".join([*align(rows), *_list_batches(results), *_list_problems(results)])


def write_json(results: Sequence[SliceResult], folder: pathlib.Path) -> pathlib.Path:
    """Writes aot_compile.json atomically; returns its path.

    The figures of an entry are the train step's; those of the eval step are under `eval`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "aot_compile.json"
    json_files.replace(path, {"topologies": [_make_entry(result) for result in results]})
    return path


def _format_row(result: SliceResult, name: str, compiled: Compiled) -> tuple[str, ...]:
    slice_ = result.slice
    first = (slice_.name, str(slice_.cores), f"{slice_.hbm_bytes / _GIB:.2f} GiB")
    empty = ("",) * (len(_HEADER) + len(_COSTS) - 4)
    if compiled is _NO_PROGRAM:
        return (*first, "would not run", *empty)
    if compiled.error:
        reason = "out of HBM" if compiled.out_of_memory else "does not compile"
        return (*first, f"{name}: {reason}", *empty)
    return (
        *first,
        f"{name} compiles",
        _format_size(compiled.peak_bytes),
        f"{compiled.peak_bytes / slice_.hbm_bytes:.1%}",
        _format_size(compiled.argument_bytes),
        _format_size(max(0, compiled.peak_bytes - compiled.argument_bytes)),
        f"{compiled.flops / 1e9:,.2f}",
        f"{compiled.bytes / _GIB:,.3f}",
        f"{compiled.flops / compiled.bytes if compiled.bytes else 0.0:.1f}",
        f"{compiled.all_reduces}, {_format_size(compiled.all_reduce_bytes)}",
        f"{compiled.seconds:.1f} s{' (twice)' * (compiled.effort == 0)}",
    )


def _list_batches(results: Sequence[SliceResult]) -> list[str]:
    return [
        f"{r.slice.name}: the largest global batch that fits is {r.largest_batch:,}, to within 1/16."
        for r in results
        if r.largest_batch
    ]


def _list_problems(results: Sequence[SliceResult]) -> list[str]:
    """Returns one line per problem; a problem of several slices is listed once."""
    problems = [problem for result in results for problem in result.problems]
    return list(dict.fromkeys(f"{'error' if p.fatal else 'warning'}: {p}" for p in problems))


def _make_entry(result: SliceResult) -> dict[str, Any]:
    train = result.programs.get("train step", _NO_PROGRAM)
    fatal = [str(problem) for problem in result.problems if problem.fatal]
    return {
        "topology": result.slice.name,
        "cores": result.slice.cores,
        "hosts": result.slice.hosts,
        "global_batch_size": result.global_batch_size,
        "compiled": result.compiled,
        **_make_figures(train),
        "hbm_bytes": result.slice.hbm_bytes,
        "seconds": result.seconds,
        "error": "; ".join(fatal) or None,
        "warnings": [str(problem) for problem in result.problems if not problem.fatal],
        "largest_global_batch_size": result.largest_batch or None,
        "eval": _make_figures(result.programs.get("eval step", _NO_PROGRAM)),
    }


def _make_figures(compiled: Compiled) -> dict[str, Any]:
    figures = ("argument_bytes", "flops", "bytes", "all_reduces", "all_reduce_bytes")
    return {
        "peak_bytes": compiled.peak_bytes or None,
        **{name: getattr(compiled, name) for name in figures},
        "compile_seconds": compiled.seconds,
    }


def _format_size(number: float) -> str:
    for unit, name, digits in ((_GIB, "GiB", 2), (_MIB, "MiB", 1), (_KIB, "KiB", 1)):
        if number >= unit:
            return f"{number / unit:.{digits}f} {name}"
    return f"{number:.0f} B"
