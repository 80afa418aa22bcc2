"""Checks that the update is a function of the global batch alone, on 1, 2 and 4 replicas."""

import atexit
from collections.abc import Callable, Sequence
import concurrent.futures
from concurrent.futures.process import BrokenProcessPool
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
from typing import Any

from ml_collections import config_dict
import numpy as np
import tensorflow as tf

from ctl import optimizers
from ctl.configs import keys, loading
from ctl.configs.error_location import error_location
from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import Examples, TrainerFactory
from ctl.private.tensorflow import context
from ctl.testing import check_replica_equivalence, split_cpu
from ctl.testing.diagnosis import causes
from ctl.testing.equivalence_report import NotComparable, Report
from ctl.testing.splits import default_batch_sizes
from ctl.trainer import StandardTrainer

REPLICAS = (1, 2, 4)
_QUICK_REPLICAS, _QUICK_ROWS = (1, 2), (4, 5)  # an even and an uneven split
_EXAMPLES = 8  # of the smallest batches; more are read in case that the step requires them
_MAX_ROWS = 32  # of the larger batches
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def start_processes() -> concurrent.futures.Executor:
    """Starts the processes of the comparison, since TensorFlow fixes its devices at first use.

    They are forks of this process, which has imported TensorFlow, unless TensorFlow may have threads.
    """
    is_used = context.context()._physical_devices is not None
    method = "forkserver" if is_used or sys.platform != "linux" else "fork"
    processes = multiprocessing.get_context(method)
    processes.set_forkserver_preload([__name__])
    folder = tempfile.TemporaryDirectory(prefix="ctl-check-")
    atexit.register(folder.cleanup)
    pool = concurrent.futures.ProcessPoolExecutor(2, processes, _prepare, (folder.name,))
    pool.submit(os.getpid)  # which starts them
    return pool


def _prepare(folder: str) -> None:
    """Hides the output and the GPUs of a process, which leaves its temporary files to its parent."""
    if sys.platform == "linux":
        # Otherwise the process would wait for a task after its parent is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    tempfile.tempdir = folder


def start(
    factory: TrainerFactory, processes: concurrent.futures.Executor, *, quick: bool = False
) -> Callable[[], Outcome]:
    """Starts to compare the trainer's updates on 1, 2 and 4 replicas; returns a function that waits.

    Args:
        factory: makes the trainers.
        processes: the result of `start_processes`, called before TensorFlow was used. One compares an
            even batch, the other one an uneven batch.
        quick: compare on 1 and 2 replicas.
    """
    config, larger = factory.experiment.config, min(factory.global_batch_size, _MAX_ROWS) // 4 * 4
    rows = with_two_labels(read_examples(factory, max(_EXAMPLES, larger + 1)))
    accumulation = min(config.optimizer.micro_batches, 2)
    replicas = _QUICK_REPLICAS if quick else REPLICAS
    small = _QUICK_ROWS if quick else default_batch_sizes(max(REPLICAS), accumulation)
    sizes = [small, (larger, larger + 1)] if larger > _EXAMPLES else [small]
    futures = [
        processes.submit(
            compare_splits, config.to_dict(), factory.config_path, rows, replicas, batch_sizes, own
        )
        for batch_sizes, own in zip(zip(*sizes, strict=True), (False, True), strict=True)
    ]
    notes = config.runtime.precision == "float16"
    values = keys.flatten(config)
    left_out = [key.name for key in keys.KEYS if key.depends_on_split and values[key.name]]
    return lambda: _judge(futures, notes=notes, left_out=left_out)


def _judge(
    futures: "Sequence[concurrent.futures.Future[Report | str]]",
    *,
    notes: bool,
    left_out: Sequence[str],
) -> Outcome:
    reports: list[Report] = []
    rejections = []
    for future in futures:
        try:
            result = future.result()
        except NotComparable as error:
            return Outcome(WARNING, f"not compared: {error}")
        except UsageError as error:  # ctl rejects every split of this batch
            rejections.append(str(error))
            continue
        except BrokenProcessPool:
            return Outcome(FAIL, "not compared: a process crashed, or was killed for its memory")
        if isinstance(result, str):
            return Outcome(FAIL, result)
        reports.append(result)
    if not reports:  # the trainer runs on one replica only
        return Outcome(FAIL, rejections[0])
    # The first report of a difference; without any, one report of all splits.
    compared = tuple(split for report in reports for split in report.compared)
    every = dataclasses.replace(reports[-1], compared=compared)
    failed = [report for report in reports if not report.equivalent]
    # An uneven batch may show the cause that an even one does not.
    vague = (causes.MEANS_OR_TWICE, causes.LOSS, causes.UNKNOWN)
    report = next((each for each in failed if each.cause not in vague), (failed or [every])[0])
    return describe_report(report, notes=notes, left_out=left_out)


def describe_report(
    report: Report, *, notes: bool = False, left_out: Sequence[str] = ()
) -> Outcome:
    """Returns the outcome of a comparison: the first difference with its cause, or what was equal.

    Args:
        report: the comparison.
        notes: whether to add the notes, which are about float16.
        left_out: the keys of the experiment that the comparison does not use.
    """
    if not report.equivalent:
        first, fix = report.headline
        if report.differences:
            first = report.differences[0].brief()
        others = len(report.differences) + len(report.errors) - 1
        return Outcome(FAIL, first + f" ({others} more)" * bool(others), fix)
    precision = report.precision
    if report.why:
        precision += f" with the tolerance of float32 ({report.why})"
    parts = max(split.micro_batches for split in report.compared)
    accumulation = f", with accumulation {parts}" if parts > 1 else ", without accumulation"
    count = len(report.compared)
    ways = "1 way to split a batch" if count == 1 else f"{count} ways to split a batch"
    gives = "gives the update of one replica" if count == 1 else "give one update"
    return Outcome(
        PASS,
        f"{ways}{accumulation}, in {precision}, {gives}"
        + "".join(f"; {note}" for note in report.notes * notes)
        + "".join(f"; {key} is not part of this comparison" for key in left_out),
    )


def compare_splits(
    config: dict[str, Any],
    config_path: str,
    rows: Examples,
    replicas: Sequence[int],
    batch_sizes: Sequence[int],
    with_optimizer: bool,
) -> Report | str:
    """Compares the splits of a batch; it runs in the other process, so its arguments can be pickled.

    A step that requires more rows than the small batch has, such as a top-k over the batch, is compared
    on a larger batch.

    Args:
        config: the config.
        config_path: its path.
        rows: the examples.
        replicas: the numbers of replicas.
        batch_sizes: the number of rows of the small batch, and that of the larger batch if there is one.
        with_optimizer: whether to compare the optimizer of the config, too.

    Returns:
        The report; or the user's line and the message, if the user's code raises an exception.
    """
    split_cpu(max(REPLICAS))
    result: Report | str = ""
    for size in batch_sizes:
        try:
            result = compare_trainer(
                config_dict.ConfigDict(config), config_path, rows, [size],
                replicas=replicas, with_optimizer=with_optimizer,
            )  # fmt: skip
        except UsageError:
            raise
        except Exception as error:
            result = result or error_location(error)
            continue
        if result.differences or not result.errors:
            break
    return result


def compare_trainer(
    config: config_dict.ConfigDict,
    config_path: str,
    rows: Examples,
    batch_sizes: Sequence[int] | None = None,
    *,
    replicas: Sequence[int] = (),
    with_optimizer: bool = True,
) -> Report:
    """Compares the splits of an experiment in this process."""
    micro_batches = config.optimizer.micro_batches
    without_xla = config_dict.ConfigDict(config.to_dict())
    without_xla.runtime.xla = "off"
    return check_replica_equivalence(
        loading.load_trainer_class(config.trainer, config_path, StandardTrainer),
        rows,
        replicas=replicas or REPLICAS,
        # As in the config; more would reject a loss that cannot accumulate.
        accumulation=sorted({1, min(micro_batches, 2)}),
        batch_sizes=batch_sizes,
        optimizer=optimizers.FromConfig(lambda _: without_xla) if with_optimizer else None,
        options=TrainerOptions.from_config(config),
        in_process=True,
    )


def read_examples(factory: TrainerFactory, count: int) -> Examples:
    """Reads the first `count` examples, from as many batches as needed.

    Batches of `ctl.data.bucketed` have different lengths, and are padded as in a longer bucket.
    """
    batches = factory.read_batches(-(-count // factory.global_batch_size))
    return tf.nest.map_structure(lambda *values: _concatenate(values)[:count], *batches)


def with_two_labels(rows: Examples) -> Examples:
    """Changes every second label if all are equal: such rows hide a loss that combines the positives."""
    label = rows.get("label")
    if not isinstance(label, np.ndarray) or label.ndim != 1 or label.dtype.kind not in "iuf":
        return rows
    if len(np.unique(label)) > 1:
        return rows
    other = np.where(label == 0, 1, 0).astype(label.dtype)
    return rows | {"label": np.where(np.arange(len(label)) % 2, other, label)}


def _concatenate(values: Sequence[np.ndarray]) -> np.ndarray:
    shape = np.max([value.shape[1:] for value in values], axis=0)
    if all(value.shape[1:] == tuple(shape) for value in values):
        return np.concatenate(values)
    widths = [[(0, 0), *((0, n) for n in shape - value.shape[1:])] for value in values]
    return np.concatenate([np.pad(*pair) for pair in zip(values, widths, strict=True)])
