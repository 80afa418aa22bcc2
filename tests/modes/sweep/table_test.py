"""The table, the best run and the plot of a sweep."""

import sys

import pytest

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
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = []
    monkeypatch.setattr(
        graph_objects.Figure, "write_html", lambda figure, path, **_: figures.append(figure)
    )
    assert "sweep.html" in table.summarize(ENTRIES, ctl.config(), tmp_path)[-1]
    (figure,) = figures
    # One color per line, the same in the plots of both metrics; the run of lion has failed.
    assert len(figure.data) == 4
    assert {trace.name for trace in figure.data} == {"name=adam", "name=sgd"}
    assert len({(trace.name, trace.line.color) for trace in figure.data}) == 2
    assert figure.layout.xaxis.type == "log"
    line = next(t for t in figure.data if t.name == "name=adam" and t.y[0] == 0.25)
    assert list(line.x) == [1e-3, 1e-1] and list(line.y) == [0.25, 0.5]


def test_without_plotly_there_is_no_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.express", None)
    assert table.summarize(ENTRIES, ctl.config(), tmp_path)[-1].endswith("sweep.csv")
