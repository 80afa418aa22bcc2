"""Checks that the update is a function of the global batch alone, on 1, 2 and 4 replicas."""

from collections.abc import Callable, Sequence
import concurrent.futures
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
from ctl.modes.check.trainer_factory import Rows, TrainerFactory
from ctl.replica.parts.part import DEPENDS_ON_SPLIT
from ctl.testing import check_replica_equivalence, multiprocess, split_cpu
from ctl.testing.equivalence_report import NotComparable, Report
from ctl.trainer import StandardTrainer

REPLICAS = (1, 2, 4)
_QUICK_REPLICAS, _QUICK_ROWS = (1, 2), (4, 5)  # an even and an uneven split
_EXAMPLES = 8  # of the smallest batches; more are read in case that the step requires them
_MAX_ROWS = 32  # of the larger batches
_TIMEOUT = 3600.0  # seconds of the comparison: each replica of a large model takes minutes to trace


def start(factory: TrainerFactory, *, quick: bool = False) -> Callable[[], Outcome]:
    """Starts to compare the trainer's updates on 1, 2 and 4 replicas; returns a function that waits.

    TensorFlow fixes its devices at first use, so the comparison needs a process of its own.

    Args:
        factory: makes the trainers.
        quick: compare an even and an uneven batch on 1 and 2 replicas.
    """
    rows = read_examples(factory, max(_EXAMPLES, _larger(factory.global_batch_size) + 1))
    config = factory.experiment.config
    arguments = [config.to_dict(), factory.config_path, rows, factory.global_batch_size, quick]
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(multiprocess.call, compare_splits, arguments, timeout=_TIMEOUT)
    pool.shutdown(wait=False)
    notes = config.runtime.precision == "float16"
    values = keys.flatten(config)
    left_out = [key for option in DEPENDS_ON_SPLIT if values[key := keys.OPTION_KEYS[option]]]
    return lambda: _judge(future, notes=notes, left_out=left_out)


def _judge(
    future: "concurrent.futures.Future[list[Any]]", *, notes: bool, left_out: Sequence[str]
) -> Outcome:
    try:
        result: Report | str = future.result()[0]
    except NotComparable as error:
        return Outcome(WARNING, f"not compared: {error}")
    except UsageError as error:  # ctl rejects every split: the trainer runs on one replica only
        return Outcome(FAIL, str(error))
    except AssertionError as error:  # the process was killed, or took too long
        return Outcome(FAIL, f"not compared: {' '.join(str(error).split())[:1000]}")
    if isinstance(result, str):
        return Outcome(FAIL, result)
    return describe_report(result, notes=notes, left_out=left_out)


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
    rows: Rows,
    global_batch_size: int,
    quick: bool = False,
) -> Report | str:
    """Compares the splits; it runs in the other process, so its arguments can be pickled.

    A step that requires more rows than the smallest batches have, such as a top-k over the batch, is
    compared on larger batches.

    Returns:
        The report; or the user's line and the message, if the user's code raises an exception.
    """
    split_cpu(max(REPLICAS))
    resolved = config_dict.ConfigDict(config)

    def compare(batch_sizes: Sequence[int] | None) -> Report | str:
        try:
            replicas = _QUICK_REPLICAS if quick else REPLICAS
            return compare_trainer(resolved, config_path, rows, batch_sizes, replicas=replicas)
        except UsageError:
            raise
        except Exception as error:
            return error_location(error)

    result = compare(_QUICK_ROWS if quick else None)
    failed = isinstance(result, str) or (result.errors and not result.differences)
    larger = _larger(global_batch_size)
    if not failed or larger <= _EXAMPLES:
        return result
    second = compare((larger, larger + 1))  # an even and an uneven split
    return result if isinstance(second, str) else second


def compare_trainer(
    config: config_dict.ConfigDict,
    config_path: str,
    rows: Rows,
    batch_sizes: Sequence[int] | None = None,
    *,
    replicas: Sequence[int] = (),
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
        optimizer=optimizers.FromConfig(lambda _: without_xla),
        options=TrainerOptions.from_config(config),
        in_process=True,
    )


def _larger(global_batch_size: int) -> int:
    """Returns the number of rows of the larger batches: at most the experiment's batch size."""
    return min(global_batch_size, _MAX_ROWS) // 4 * 4


def read_examples(factory: TrainerFactory, count: int) -> Rows:
    """Reads the first `count` examples, from as many batches as needed.

    Batches of `ctl.data.bucketed` have different lengths, and are padded as in a longer bucket.
    """
    batches = factory.read_batches(-(-count // factory.global_batch_size))
    return tf.nest.map_structure(lambda *values: _concatenate(values)[:count], *batches)


def _concatenate(values: Sequence[np.ndarray]) -> np.ndarray:
    shape = np.max([value.shape[1:] for value in values], axis=0)
    if all(value.shape[1:] == tuple(shape) for value in values):
        return np.concatenate(values)
    widths = [[(0, 0), *((0, n) for n in shape - value.shape[1:])] for value in values]
    return np.concatenate([np.pad(*pair) for pair in zip(values, widths, strict=True)])
