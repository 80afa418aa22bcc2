"""Compiles an experiment for several slices, searches for the largest batch, and prints a table."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import tensorflow as tf

from ctl.data.source import GlobalBatches, PerReplica
from ctl.errors import UsageError, align, print_line
from ctl.hardware import selection
from ctl.loop import json_files
from ctl.modes import experiment
from ctl.modes.aot_compile import compiler_process
from ctl.modes.aot_compile.compiler_process import Compiled
from ctl.modes.aot_compile.problems import NotExportable, Problem
from ctl.modes.aot_compile.programs import Program, export_eval_step, export_train_step
from ctl.modes.aot_compile.slices import GIB, Slice
from ctl.modes.aot_compile.strategy import SliceStrategy
from ctl.replica.step.engine import engine_of

_MAX_ROWS = 2**20  # per core; a larger result would be an error of the search
_PRECISION = 16  # the result is exact to one part in this number


@dataclasses.dataclass(frozen=True)
class SliceResult:
    """The result for one slice.

    Attributes:
        slice: the slice.
        global_batch_size: the global batch size of training.
        programs: "train step" and "eval step" -> the compiler's result.
        problems: what keeps the experiment from running on the slice, and what may be slow.
        largest_batch: the largest global batch that fits; 0 if not searched for, or if none fits.
        seconds: time for building, exporting and compiling.
    """

    slice: Slice
    global_batch_size: int
    programs: dict[str, Compiled]
    problems: list[Problem]
    largest_batch: int = 0
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether all programs compile and fit."""
        return not any(problem.fatal for problem in self.problems)


@dataclasses.dataclass(frozen=True)
class ExportedExperiment:
    """The programs of an experiment for slices with a certain number of cores.

    Attributes:
        global_batch_size: the global batch size of training.
        programs: the train step and the eval step.
        problems: why they could not be exported; empty if they were.
        seconds: time for building and exporting.
    """

    global_batch_size: int
    programs: list[Program]
    problems: list[Problem]
    seconds: float


def compile_for_slices(
    config: Any,
    config_path: str,
    slices: Sequence[Slice],
    *,
    find_batch: bool,
) -> list[SliceResult]:
    """Compiles an experiment's train step and eval step for each slice.

    Args:
        config: a validated config.
        config_path: the config file.
        slices: the slices.
        find_batch: whether to search for the largest batch that fits.

    Raises:
        UsageError: the config does not work on such a slice, or this machine has no compiler.
        Failure: the compiler or its environment failed.
    """
    compiler_process.find_python()  # before the experiment is built
    # The compiled programs use no GPU. RuntimeError: this process has initialized its GPUs already.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    export_for_cores = functools.lru_cache(
        lambda cores: export_experiment(config, config_path, cores)
    )
    results = []
    for slice_ in slices:
        result = _compile(slice_, export_for_cores(slice_.cores))
        state = "compiles" if result.compiled else "would not run"
        print_line(f"{slice_.name}: {state} ({result.seconds:g} s)")
        if find_batch:
            largest = _find_largest_batch(result, config, config_path)
            result = dataclasses.replace(result, largest_batch=largest)
        results.append(result)
    return results


def export_experiment(
    config: Any,
    config_path: str,
    cores: int,
    *,
    global_batch_size: int = 0,
    evaluates: bool = True,
) -> ExportedExperiment:
    """Builds and exports an experiment.

    Args:
        config: a validated config.
        config_path: the config file.
        cores: the number of replicas.
        global_batch_size: the global batch size; the config's if 0.
        evaluates: whether to export the eval step too.
    """
    start = time.monotonic()
    hardware = selection.Hardware(SliceStrategy(cores), "tpu", "compiled ahead of time")
    if global_batch_size:
        config = type(config)(config.to_dict())
        config.data.global_batch_size, config.data.per_replica_batch_size = global_batch_size, 0
    programs: list[Program] = []
    problems: list[Problem] = []
    size = 0
    try:
        built = experiment.build(config, config_path, evaluates=evaluates, hardware=hardware)
        size = built.trainer.global_batch_size
        data = engine_of(built.trainer).pipeline.data("train")
        if global_batch_size and isinstance(data, GlobalBatches | PerReplica):
            raise UsageError(
                "--find_batch cannot change the size of the batches that build_dataset returns: let "
                "it return examples."
            )
        programs.append(export_train_step(built.trainer))
        if built.evaluator is not None:
            programs.append(export_eval_step(built.evaluator))
    except NotExportable as error:
        problems = error.problems
    return ExportedExperiment(size, programs, problems, time.monotonic() - start)


def _compile(slice_: Slice, exported: ExportedExperiment) -> SliceResult:
    start = time.monotonic()
    compiled: dict[str, Compiled] = {}
    problems = list(exported.problems)
    for program in exported.programs if not problems else []:
        problems += program.warnings
        result = compiler_process.compile_program(program.hlo, slice_)
        compiled[program.name] = result
        if result.error:
            problems.append(_describe_error(program.name, result, slice_))
    seconds = round(exported.seconds + time.monotonic() - start, 1)
    return SliceResult(slice_, exported.global_batch_size, compiled, problems, seconds=seconds)


def _describe_error(name: str, compiled: Compiled, slice_: Slice) -> Problem:
    if not compiled.out_of_memory:
        return Problem(f"the {name} does not compile: {compiled.error}")
    needs = f"{compiled.peak_bytes / GIB:.2f} GiB" if compiled.peak_bytes else "more"
    return Problem(
        f"the {name} does not fit: it needs {needs} of HBM, but a core of {slice_.name} has "
        f"{slice_.hbm_bytes / GIB:.2f} GiB. Use a smaller batch (--find_batch finds the largest), "
        "more optimizer.gradient_accumulation_steps, or a larger slice."
    )


def _find_largest_batch(result: SliceResult, config: Any, config_path: str) -> int:
    """Returns the largest global batch that fits; 0 after an error other than memory."""
    train = result.programs.get("train step")
    if train is None or (train.error and not train.out_of_memory):
        return 0
    cores = result.slice.cores

    def fits(rows: int) -> bool:
        exported = export_experiment(
            config, config_path, cores, global_batch_size=rows * cores, evaluates=False
        )
        if exported.problems:
            return False
        compiled = compiler_process.compile_program(exported.programs[0].hlo, result.slice)
        verdict = "does not fit" if compiled.error else "fits"
        print_line(f"{result.slice.name}: a batch of {rows * cores} {verdict}")
        return not compiled.error

    rows = -(-result.global_batch_size // cores)
    return cores * find_largest(fits, rows, is_fitting=not train.error)


def find_largest(fits: Callable[[int], bool], rows: int, *, is_fitting: bool) -> int:
    """Finds the largest number of rows per core that fits, to within a sixteenth.

    Args:
        fits: returns whether a number of rows fits.
        rows: a number whose result is known.
        is_fitting: whether `rows` fit.

    Returns:
        The rows per core, which were compiled; 0 if not even one row fits.
    """
    low, high = (
        (rows, 0) if is_fitting else (0, rows)
    )  # `low` fits, and `high` does not; 0: unknown
    while not high or high - low > max(1, low // _PRECISION):
        guess = (low + high) // 2 if high else 4 * low
        if guess > _MAX_ROWS:
            break
        if fits(guess):
            low = guess
        else:
            high = guess
    return low


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
