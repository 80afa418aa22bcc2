"""Checks of keys of the sections `train` and `eval` that depend on each other."""

import contextlib

import pytest

import ctl
from ctl.configs import validation
from ctl.errors import UsageError


def valid(**changes):
    """A valid config, with sections changed."""
    return ctl.config(trainer="net.py:Net", data=dict(global_batch_size=4), **changes)


BEST = dict(metric="eval/accuracy", mode="max")


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        (dict(best=dict(metric="eval/loss")), {}, "train.best.mode is not set: choose max"),
        (
            dict(best=dict(mode="max")),
            {},
            "train.best.mode has no effect without train.best.metric",
        ),
        (dict(best=dict(keep=2)), {}, "train.best.keep has no effect without train.best.metric"),
        (dict(best=dict(BEST, mode="high")), {}, "train.best.mode is 'high'"),
        (dict(best=dict(BEST, metric="accuracy")), {}, "must be the name of a metric of the eval"),
        (
            dict(best=dict(BEST, metric="train/loss")),
            {},
            "must be the name of a metric of the eval",
        ),
        (dict(best=dict(BEST, keep=0)), {}, "train.best.keep is 0, but must be at least 1"),
        (dict(early_stopping=BEST), {}, "has no effect with eval.interval=0"),
        (dict(early_stopping=BEST), dict(interval="5 minutes"), "must not depend on the speed"),
        (dict(early_stopping=dict(patience=5)), dict(interval=5), "patience has no effect without"),
        (
            dict(early_stopping=dict(BEST, min_delta=-1.0)),
            dict(interval=5),
            "min_delta is -1.0, but must be a finite number, at least 0",
        ),
        (
            dict(early_stopping=dict(BEST, restore_best=True), best=dict(BEST, metric="eval/f1")),
            dict(interval=5),
            "restores the best eval/accuracy, but train.best.metric is eval/f1: use one metric",
        ),
    ],
)
def test_monitored_metrics_are_checked(train, evaluation, message):
    with pytest.raises(UsageError, match=message):
        validation.check_config(valid(train=train, eval=evaluation))


def test_monitored_metrics_may_be_combined():
    stopping = dict(BEST, patience=2, restore_best=True)
    train = dict(best=dict(BEST, keep=3), early_stopping=stopping)
    validation.check_config(valid(train=train, eval=dict(interval=5)))
    validation.check_config(valid(train=dict(best=dict(BEST, metric="eval/test/accuracy"))))


def test_rollback_limit_requires_rollback():
    validation.check_config(valid(train=dict(on_non_finite="rollback", rollback_limit=3)))
    with pytest.raises(
        UsageError, match=r"rollback_limit has no effect with .*=stop: set it to 10"
    ):
        validation.check_config(valid(train=dict(rollback_limit=3)))


@pytest.mark.parametrize(("steps", "rejected"), [(100, True), (101, False), ("3 epochs", False)])
def test_compression_that_starts_after_the_last_step_is_rejected(steps, rejected):
    reduction = dict(compression="powersgd", rank=2, compression_start=100)
    config = valid(train=dict(steps=steps), runtime=dict(all_reduce=reduction))
    message = (
        "compression_start is 100, but train.steps is 100, so no step is compressed: choose an"
    )
    with pytest.raises(UsageError, match=message) if rejected else contextlib.nullcontext():
        validation.check_config(config)
