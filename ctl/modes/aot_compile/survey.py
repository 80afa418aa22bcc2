"""Compiles an experiment for one slice after the other."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import tensorflow as tf

from ctl.data.source import GlobalBatches, PerReplica
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.modes import experiment
from ctl.modes.aot_compile import batch_search, compiling, environment, export
from ctl.modes.aot_compile.compiling import Compiled
from ctl.modes.aot_compile.export import Program
from ctl.modes.aot_compile.problems import Problem, Unfit
from ctl.modes.aot_compile.slices import Slice
from ctl.modes.aot_compile.strategy import SliceStrategy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one slice.

    Attributes:
        slice: the slice.
        global_batch_size: of training.
        programs: "train step" and "eval step" -> what the compiler found.
        problems: what keeps it from running there, and what may be slow.
        largest_batch: the largest global batch that fits; 0 if nobody asked, or none does.
        seconds: of building, exporting and compiling.
    """

    slice: Slice
    global_batch_size: int
    programs: dict[str, Compiled]
    problems: list[Problem]
    largest_batch: int = 0
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether all of it compiles, and fits."""
        return not any(problem.fatal for problem in self.problems)


@dataclasses.dataclass(frozen=True)
class Exported:
    """An experiment as programs for slices of so many cores, or what is wrong with it.

    Attributes:
        global_batch_size: of training.
        programs: the train step and the eval step.
        problems: what keeps them from being programs.
        seconds: of building and exporting.
    """

    global_batch_size: int
    programs: list[Program]
    problems: list[Problem]
    seconds: float


def survey(
    config: Any,
    config_path: str,
    asked: Sequence[Slice],
    *,
    find_batch: bool = False,
    print_line: Callable[[str], None] = print,
) -> list[Outcome]:
    """Compiles an experiment's train and eval step for each slice.

    Args:
        config: a checked config.
        config_path: the file that it is from.
        asked: the slices.
        find_batch: whether to search for the largest batch that fits.
        print_line: prints a line.

    Raises:
        UsageError: the config cannot be right on such a slice, or this machine has no compiler.
        Failure: the compiler, or its environment, failed.
    """
    python = environment.python()
    with contextlib.suppress(RuntimeError):  # this process has used its GPUs already
        tf.config.set_visible_devices([], "GPU")  # what is compiled is no GPU's
    exported = functools.lru_cache(lambda cores: export_for(config, config_path, cores))
    outcomes = []
    for slice_ in asked:
        outcome = _compile(slice_, exported(slice_.cores), python)
        print_line(_line(outcome))
        if find_batch:
            outcome = _with_batch(outcome, config, config_path, python, print_line)
        outcomes.append(outcome)
    return outcomes


def export_for(
    config: Any, config_path: str, cores: int, *, batch: int = 0, evaluates: bool = True
) -> Exported:
    """Builds an experiment for so many cores and exports it.

    Args:
        config: a checked config.
        config_path: the file that it is from.
        cores: replicas.
        batch: the global batch; that of the config if 0.
        evaluates: whether to export the eval step too.
    """
    start = time.monotonic()
    hardware = strategies.Hardware(SliceStrategy(cores), "tpu", "compiled ahead of time")
    if batch:
        config = type(config)(config.to_dict())
        config.data.global_batch_size, config.data.per_replica_batch_size = batch, 0
    programs: list[Program] = []
    wrong: list[Problem] = []
    size = 0
    try:
        built = experiment.build(config, config_path, evaluates=evaluates, hardware=hardware)
        size = built.trainer.global_batch_size
        if batch and isinstance(built.trainer.feed.data("train"), GlobalBatches | PerReplica):
            raise UsageError(
                "--find_batch cannot change the batches that build_dataset has made: let it return "
                "examples."
            )
        programs.append(export.train_step(built.trainer))
        if built.evaluator is not None:
            programs.append(export.eval_step(built.evaluator))
    except Unfit as unfit:
        wrong = unfit.problems
    return Exported(size, programs, wrong, time.monotonic() - start)


def _compile(slice_: Slice, exported: Exported, python: pathlib.Path) -> Outcome:
    start = time.monotonic()
    found: dict[str, Compiled] = {}
    wrong = list(exported.problems)
    for program in exported.programs if not wrong else []:
        wrong += program.warnings
        found[program.name] = compiling.compile_for(program.hlo, slice_, python)
        if found[program.name].error:
            wrong.append(_told(program.name, found[program.name], slice_))
    seconds = exported.seconds + time.monotonic() - start
    return Outcome(slice_, exported.global_batch_size, found, wrong, seconds=round(seconds, 1))


def _told(name: str, compiled: Compiled, slice_: Slice) -> Problem:
    if not compiled.out_of_memory:
        return Problem(f"the {name} does not compile: {compiled.error}")
    limit = slice_.hbm_bytes / 2**30
    needs = f"{compiled.peak_bytes / 2**30:.2f} GiB" if compiled.peak_bytes else "more"
    return Problem(
        f"the {name} does not fit: it needs {needs} of HBM, and a core of {slice_.name} has {limit:.2f} "
        "GiB. Take a smaller batch (--find_batch finds the largest), more "
        "optimizer.gradient_accumulation_steps, or a larger slice."
    )


def _line(outcome: Outcome) -> str:
    state = "compiles" if outcome.compiled else "would not run"
    return f"{outcome.slice.name}: {state} ({outcome.seconds:g} s)"


def _with_batch(
    outcome: Outcome,
    config: Any,
    config_path: str,
    python: pathlib.Path,
    print_line: Callable[[str], None],
) -> Outcome:
    """The outcome, with the largest batch that fits, where memory is all that is in question."""
    train = outcome.programs.get("train step")
    if train is None or (train.error and not train.out_of_memory):
        return outcome
    cores = outcome.slice.cores

    def peak(rows: int) -> int | None:
        exported = export_for(config, config_path, cores, batch=rows * cores, evaluates=False)
        if exported.problems:
            return None
        found = compiling.compile_for(exported.programs[0].hlo, outcome.slice, python)
        print_line(
            f"{outcome.slice.name}: a batch of {rows * cores} {'does not fit' * bool(found.error)}"
            f"{'fits' * (not found.error)}"
        )
        return None if found.error else found.peak_bytes

    rows = -(-outcome.global_batch_size // cores)
    known = {rows: None if train.error else train.peak_bytes}
    largest = batch_search.largest(peak, limit=outcome.slice.hbm_bytes, known=known)
    return dataclasses.replace(outcome, largest_batch=largest * cores)
