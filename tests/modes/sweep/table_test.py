"""The table and the best run of a sweep."""

import ctl
from ctl.modes.sweep import table


def entry(rate, name, loss=None, status="done"):
    values = {"optimizer.learning_rate": rate, "optimizer.name": name}
    evaluation = {} if loss is None else {"eval": {"loss": loss, "test": {"accuracy": 1 - loss}}}
    return {
        "name": f"{rate},{name}",
        "values": values,
        "status": status,
        "step": 5,
        "line": "",
        **evaluation,
    }


ENTRIES = [
    entry("1e-3", "adam", 0.25), entry("1e-1", "adam", 0.5), entry("1e-3", "sgd", 0.125, "stopped"),
    entry("1e-1", "sgd", float("nan")), entry("1e-1", "lion", status="failed"),
]  # fmt: skip


def test_best_run_is_one_that_is_done_by_the_metric_of_the_config(tmp_path):
    lines = table.summarize(ENTRIES, ctl.config(), tmp_path)
    assert "Best eval/loss: 0.2500 of 1e-3,adam." in lines
    best = dict(metric="eval/test/accuracy", mode="min")
    lines = table.summarize(ENTRIES, ctl.config(train=dict(best=best)), tmp_path)
    assert "Best eval/test/accuracy: 0.5000 of 1e-1,adam." in lines
    assert lines[0].split()[:6] == [
        "optimizer.learning_rate", "optimizer.name", "status", "step", "eval/loss",
        "eval/test/accuracy",
    ]  # fmt: skip
