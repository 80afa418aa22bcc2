"""ctl.testing.assert_curve: asserts that training computes the values in a golden file."""

import os
import pathlib
from typing import TypeAlias

from ml_collections import config_dict
import tf_keras

import ctl
from ctl.errors import UsageError, print_line
from ctl.testing.golden import comparison, curve, recording
from ctl.testing.golden.comparison import CurveReport
from ctl.testing.golden.curve import Curve
from ctl.trainer import StandardTrainer

UPDATE = "CTL_UPDATE_GOLDEN"  # the variable that the pytest option --update_golden sets

# The curves that this process has recorded, so that two tests of one file do not replace each other's.
_recorded: dict[pathlib.Path, Curve] = {}

Experiment: TypeAlias = str | os.PathLike[str] | config_dict.ConfigDict | StandardTrainer


def assert_curve(
    path: str | os.PathLike[str],
    experiment: Experiment,
    *,
    steps: int = 20,
) -> CurveReport:
    """Asserts that the first steps of training compute the values that a golden file has recorded.

        def test_training_is_unchanged():
            ctl.testing.assert_curve("golden/mnist.json", "experiments/mnist.py", steps=20)

    The golden file has, for each step, the loss, and for each trainable variable and moving statistic
    the norm of its update and a hash. If versions, CPU, devices, strategy and options are as in the
    recording, the bits must be the same. Otherwise a tolerance for rounding errors holds, which was
    measured when the file was recorded; `ctl/testing/golden/recording.py` derives it.

    `pytest --update_golden`, or the environment variable CTL_UPDATE_GOLDEN=1, records the file. It is
    never written otherwise, and a missing file is an error: a test that records what it finds passes
    in a checkout in which the file was forgotten.

    Args:
        path: the golden file; commit it together with the test.
        experiment: a config file, the result of `ctl.config(...)`, or an untrained trainer, which this
            function trains.
        steps: the number of steps; at most as many as in the recording.

    Returns:
        The comparison.

    Raises:
        AssertionError: a step differs; the message names the first one, the first tensor in it, and
            what has changed, and the features of the batch that differ.
        UsageError: there is no such file, it is damaged, the trainer is not a new one, or this process
            has recorded another curve in the same file.
    """
    file = pathlib.Path(path)
    if is_updating():
        _update(file, _record(experiment, steps, measure_tolerance=True))
        return CurveReport(())
    if not file.exists():
        raise UsageError(
            f"{file} does not exist: record it by pytest --update_golden, or with {UPDATE}=1 in the "
            "environment, and commit it."
        )
    recorded = curve.read(file)
    report = comparison.compare(_record(experiment, steps, measure_tolerance=False), recorded)
    if not report.equal:
        raise AssertionError(f"{file}: {report.failure()}")
    return report


def is_updating() -> bool:
    """Returns whether `assert_curve` records golden files instead of comparing with them."""
    return os.environ.get(UPDATE, "0") not in ("", "0")


def _update(file: pathlib.Path, recorded: Curve) -> None:
    if not _agree(recorded, _recorded.setdefault(file.resolve(), recorded)):
        raise UsageError(
            f"{file} was recorded already, by another test of this run with another curve: give each "
            "of them its own file, or skip the test that only compares when golden files are recorded."
        )
    try:
        old = curve.read(file) if file.exists() else None
    except UsageError:
        old = None  # a damaged file, or one of another format, is recorded again
    if old and old.repeatable and _agree(recorded, old):
        print_line(f"{file} is unchanged.")
        return
    curve.write(file, recorded)
    last = recorded.steps[-1]
    repeatable = "" if recorded.repeatable else "; two runs had different bits"
    print_line(
        f"{file}: recorded {len(recorded.steps)} steps of {len(recorded.tensors)} tensors; last loss "
        f"{last.loss:.5g} +- {last.loss_tolerance:.1g} on other machines{repeatable}"
    )


def _agree(new: Curve, old: Curve) -> bool:
    same = len(new.steps) == len(old.steps) and new.environment == old.environment
    return same and comparison.compare(new, old).equal


def _record(experiment: Experiment, steps: int, *, measure_tolerance: bool) -> Curve:
    if isinstance(experiment, StandardTrainer):
        return recording.record(experiment, steps, measure_tolerance=measure_tolerance)
    # Keras numbers the layers of a process, and options name variables by pattern.
    tf_keras.backend.reset_uids()
    with ctl.Run(experiment, print_lines=False) as run:
        return recording.record(run.trainer, steps, measure_tolerance=measure_tolerance)
