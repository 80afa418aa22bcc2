"""Compiles an experiment for several slices, and prints a table."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import tensorflow as tf

from ctl.errors import align, print_line
from ctl.hardware import selection
from ctl.loop import json_files
from ctl.modes import experiment
from ctl.modes.aot_compile import compiler_process
from ctl.modes.aot_compile.compiler_process import Compiled
from ctl.modes.aot_compile.problems import NotExportable, Problem
from ctl.modes.aot_compile.programs import Program, export_eval_step, export_train_step
from ctl.modes.aot_compile.slices import GIB, TpuSlice
from ctl.modes.aot_compile.strategy import SliceStrategy

DISCLAIMER = (
    "A step that compiles and fits need not be fast, and no figure was compared with a physical "
    "TPU."
)
_HEADER = ("slice", "cores", "HBM per core", "result", "peak", "of HBM", "arguments", "temporaries")
_COSTS = ("Gflop", "GiB moved", "flop/byte", "all-reduces", "compile")
_FIGURES = ("argument_bytes", "flops", "bytes", "all_reduces", "all_reduce_bytes")
# The global batch size of training, the programs, and why they could not be exported.
Exported = tuple[int, list[Program], list[Problem]]


@dataclasses.dataclass(frozen=True)
class SliceResult:
    """The result for one slice.

    Attributes:
        slice: the slice.
        global_batch_size: the global batch size of training.
        programs: "train step" and "eval step" -> the compiler's result.
        problems: what keeps the experiment from running on the slice, and what may be slow.
        seconds: time for building, exporting and compiling. Slices with as many cores as an earlier
            one use its programs.
    """

    slice: TpuSlice
    global_batch_size: int
    programs: dict[str, Compiled]
    problems: list[Problem]
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether all programs compile and fit."""
        return not any(problem.fatal for problem in self.problems)


def compile_for_slices(
    config: Any, config_path: str, slices: Sequence[TpuSlice]
) -> list[SliceResult]:
    """Compiles an experiment's train step and eval step for each slice.

    Args:
        config: a validated config.
        config_path: the config file.
        slices: the slices.

    Raises:
        UsageError: the config does not work on such a slice, or this machine has no compiler.
        Failure: the compiler or its environment failed.
    """
    compiler_process.find_python()  # before the experiment is built
    # The compiled programs use no GPU. RuntimeError: this process has initialized its GPUs already.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    export = functools.cache(functools.partial(export_experiment, config, config_path))
    results = []
    for slice_ in slices:
        start = time.monotonic()
        result = _compile(slice_, export(slice_.cores))
        result = dataclasses.replace(result, seconds=round(time.monotonic() - start, 1))
        state = "compiles" if result.compiled else "would not run"
        print_line(f"{slice_.name}: {state} ({result.seconds:g} s)")
        results.append(result)
    return results


def export_experiment(config: Any, config_path: str, cores: int) -> Exported:
    """Builds and exports an experiment.

    Args:
        config: a validated config.
        config_path: the config file.
        cores: the number of replicas.
    """
    hardware = selection.Hardware(SliceStrategy(cores), "tpu", "compiled ahead of time")
    programs: list[Program] = []
    size = 0
    try:
        built = experiment.build(config, config_path, hardware=hardware)
        size = built.trainer.global_batch_size
        programs.append(export_train_step(built.trainer))
        if built.evaluator is not None:
            programs.append(export_eval_step(built.evaluator))
    except NotExportable as error:
        return size, [], error.problems
    return size, programs, []


def _compile(slice_: TpuSlice, exported: Exported) -> SliceResult:
    size, programs, problems = exported
    result = SliceResult(slice_, size, {}, list(problems))
    for program in programs:
        compiled = compiler_process.compile_program(program.hlo, slice_)
        result.programs[program.name] = compiled
        result.problems.extend(program.warnings)
        if compiled.error:
            result.problems.append(_describe_error(program.name, compiled, slice_))
    return result


def _describe_error(name: str, compiled: Compiled, slice_: TpuSlice) -> Problem:
    if not compiled.out_of_memory:
        return Problem(f"the {name} does not compile: {compiled.error}")
    needs = f"{compiled.peak_bytes / GIB:.2f} GiB" if compiled.peak_bytes else "more"
    return Problem(
        f"the {name} does not fit: it needs {needs} of HBM, but a core of {slice_.name} has "
        f"{slice_.hbm_bytes / GIB:.2f} GiB. Use a smaller batch, more optimizer.micro_batches, or a "
        "larger slice."
    )


def format_table(results: Sequence[SliceResult]) -> str:
    """Formats one row per slice and program, and then the problems."""
    rows: list[tuple[str, ...]] = [(*_HEADER, *_COSTS)]
    for result in results:
        programs: dict[str, Compiled | None] = {**result.programs} or {"": None}
        rows += [_format_row(result.slice, name, compiled) for name, compiled in programs.items()]
    # A problem of several slices is listed once.
    problems = dict.fromkeys(problem for result in results for problem in result.problems)
    lines = [f"{'error' if p.fatal else 'warning'}: {p}" for p in problems]
    return "\n".join([*align(rows), *lines])


def write_json(results: Sequence[SliceResult], folder: pathlib.Path) -> pathlib.Path:
    """Writes aot_compile.json atomically; returns its path.

    The figures of an entry are the train step's; those of the eval step are under `eval`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "aot_compile.json"
    json_files.replace(path, {"topologies": [_make_entry(result) for result in results]})
    return path


def _format_row(slice_: TpuSlice, name: str, compiled: Compiled | None) -> tuple[str, ...]:
    row = [slice_.name, str(slice_.cores), f"{slice_.hbm_bytes / GIB:.2f} GiB"]
    if compiled is None:
        row.append("would not run")
    elif compiled.error:
        reason = "out of HBM" if compiled.out_of_memory else "does not compile"
        row.append(f"{name}: {reason}")
    else:
        row += [
            f"{name} compiles",
            _format_size(compiled.peak_bytes),
            f"{compiled.peak_bytes / slice_.hbm_bytes:.1%}",
            _format_size(compiled.argument_bytes),
            _format_size(max(0, compiled.peak_bytes - compiled.argument_bytes)),
            f"{compiled.flops / 1e9:,.2f}",
            f"{compiled.bytes / GIB:,.3f}",
            f"{compiled.flops / compiled.bytes if compiled.bytes else 0.0:.1f}",
            f"{compiled.all_reduces}, {_format_size(compiled.all_reduce_bytes)}",
            f"{compiled.seconds:.1f} s{' (twice)' * (compiled.effort == 0)}",
        ]
    return (*row, *[""] * (len(_HEADER) + len(_COSTS) - len(row)))


def _make_entry(result: SliceResult) -> dict[str, Any]:
    fatal = [str(problem) for problem in result.problems if problem.fatal]
    return {
        "topology": result.slice.name,
        "cores": result.slice.cores,
        "hosts": result.slice.hosts,
        "global_batch_size": result.global_batch_size,
        "compiled": result.compiled,
        **_make_figures(result, "train step"),
        "hbm_bytes": result.slice.hbm_bytes,
        "seconds": result.seconds,
        "error": "; ".join(fatal) or None,
        "warnings": [str(problem) for problem in result.problems if not problem.fatal],
        "eval": _make_figures(result, "eval step"),
    }


def _make_figures(result: SliceResult, name: str) -> dict[str, Any]:
    compiled = result.programs.get(name, Compiled())
    figures = {figure: getattr(compiled, figure) for figure in _FIGURES}
    peak = compiled.peak_bytes or None
    return {"peak_bytes": peak, **figures, "compile_seconds": compiled.seconds}


def _format_size(number: float) -> str:
    for unit, name, digits in ((GIB, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if number >= unit:
            return f"{number / unit:.{digits}f} {name}"
    return f"{number:.0f} B"
