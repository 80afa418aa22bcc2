"""Reading and comparing a metric."""

import pytest

import ctl
from ctl.evaluator import StandardEvaluator
from ctl.loop.actions.monitored_metric import MonitoredMetric

NAN = float("nan")


@pytest.mark.parametrize(
    ("mode", "value", "than", "min_delta", "better"),
    [
        ("min", 0.7, 0.8, 0.0, True),
        ("max", 0.875, 0.75, 0.125, False),  # exactly min_delta
        ("min", 0.625, 0.75, 0.125, False),
        ("max", -1e300, None, 0.0, True),
        ("max", NAN, None, 0.0, False),
        ("min", 0.5, NAN, 0.0, True),
        ("max", float("-inf"), None, 0.0, True),
    ],
)
def test_better(mode, value, than, min_delta, better):
    assert MonitoredMetric("eval/x", mode).is_better(value, than, min_delta=min_delta) == better


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eval/acuracy", "no metric eval/acuracy: did you mean eval/accuracy?"),
        ("eval/f1", "no metric eval/f1: expected one of eval/loss, eval/accuracy, eval/by_class"),
        ("eval/loss/a", "no metric eval/loss/a: it is not a section"),
        ("eval/by_class", "eval/by_class is a list, but must be one number"),
    ],
)
def test_value_that_does_not_exist_or_is_no_number_is_rejected(name, message):
    with pytest.raises(ctl.UsageError, match=message):
        MonitoredMetric(name, "max").read({"loss": 0.5, "accuracy": 0.5, "by_class": [0.1, 0.9]})


class Evaluator(StandardEvaluator):
    def __init__(self, splits=("eval",), collects=False):
        self.metrics = {"accuracy": None}
        self.splits, self._collects = splits, collects


class Own(Evaluator):
    def eval_end(self):
        return {"anything": 1.0}


def test_name_is_checked_before_training_as_far_as_the_evaluator_is_known():
    """tests/modes/train_test.py has the messages of the program."""
    MonitoredMetric("eval/acuracy", "max").check(Own())
    for name in ("accuracy", "loss", "examples"):
        MonitoredMetric(f"eval/{name}", "max").check(Evaluator())
    evaluator = Evaluator(splits=("valid", "test"))
    MonitoredMetric("eval/test/accuracy", "max").check(evaluator)
    for name, message in {
        "eval/tset/accuracy": "has several splits, so name one, as in eval/valid/accuracy",
        "eval/test/acuracy": "no metric eval/test/acuracy",
    }.items():
        with pytest.raises(ctl.UsageError, match=message):
            MonitoredMetric(name, "max").check(evaluator)
    MonitoredMetric("eval/test/auc", "max").check(Evaluator(splits=("a", "test"), collects=True))


@pytest.mark.parametrize(("name", "mode"), [("loss", "min"), ("eval/", "min"), ("eval/a", "low")])
def test_bad_arguments_are_rejected(name, mode):
    with pytest.raises(ctl.UsageError):
        MonitoredMetric(name, mode)
