"""The table, the best run and the plot of a sweep."""

import re
import sys

import ctl
from ctl.modes.sweep import table


def entry(rate, name, loss=None, status="done"):
    values = {"optimizer.learning_rate": rate, "optimizer.name": name}
    evaluation = {} if loss is None else {"eval": {"loss": loss, "test": {"accuracy": 1 - loss}}}
    return {"name": f"{rate},{name}", "values": values, "status": status, "step": 5, **evaluation}


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


def test_plot_has_a_line_per_value_of_the_other_keys(tmp_path, monkeypatch):
    lines = table.summarize(ENTRIES, ctl.config(), tmp_path)
    page = (tmp_path / "sweep.html").read_text() if (tmp_path / "sweep.html").exists() else ""
    assert ("sweep.html" in lines[-1]) == bool(page)
    if page:  # the extra `report` is installed
        assert all(f'"name":"name={name}"' in page for name in ("adam", "sgd", "lion"))
        assert '"type":"log"' in page and '"ticktext":["1e-3","1e-1"]' in page
        # One color per line, the same in the plots of both metrics.
        colors = re.findall(r'"marker":{"color":"(#\w+)"', page)
        assert len(colors) == 6 and colors[:3] == colors[3:] and len({*colors}) == 3

    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)  # as if it were not installed
    assert table.summarize(ENTRIES, ctl.config(), tmp_path)[-1].endswith("sweep.csv")
