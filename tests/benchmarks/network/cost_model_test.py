"""The model of a step's cost, by numbers that are computed by hand."""

import dataclasses

import pytest

from benchmarks.network import __main__ as program
from benchmarks.network.cost_model import CostModel, Measurement, fit
from tests.support import child

# 1,000,000 bytes between 4 workers: 6 rounds of 250,000 bytes. At 10 Mbit/s each takes 0.2 s.
POINT = Measurement(
    "a model", gradient_bytes=1_000_000, workers=4, mbits=10, computing=0.5, step=2.0, sent=1.5e6
)


def test_step_is_computing_the_transfer_with_its_overhead_and_a_latency_per_round():
    assert POINT.reducing == 1.5
    assert CostModel(1.1, 0.01).step(POINT) == pytest.approx(0.5 + 1.1 * 1.2 + 6 * 0.01)


def test_fit_returns_the_model_that_the_points_were_computed_with():
    exact = CostModel(1.25, 0.003)
    other = dataclasses.replace(POINT, workers=2, gradient_bytes=900_000, mbits=1000)
    fitted = fit([dataclasses.replace(each, step=exact.step(each)) for each in (POINT, other)])
    assert fitted.overhead == pytest.approx(1.25) and fitted.latency == pytest.approx(0.003)


def test_points_with_the_same_chunks_are_rejected():
    with pytest.raises(ValueError, match="same time"):
        fit([POINT, dataclasses.replace(POINT, step=3.0)])


def test_table_shows_each_error_except_those_of_the_fitted_points():
    exact = CostModel(1.0, 0.0)
    points = [dataclasses.replace(POINT, mbits=rate, workers=2) for rate in (100, 10, 1)]
    points = [dataclasses.replace(point, step=exact.step(point)) for point in points]
    points[1] = dataclasses.replace(points[1], step=points[1].step / 1.3)
    points.append(dataclasses.replace(POINT, mbits=None))
    table = program.table(points, fit(program.fitted_points(points)))
    assert table.count("| fitted |") == 2 and table.count("| +30 % |") == 1
    assert "| a model | 2 | 10 | 500.0 ms | 500.0 ms | 1,000.0 ms | 1,300.0 ms | +30 % |" in table
    assert "| a model | 4 | no limit | 500.0 ms | 1,500.0 ms | 2,000.0 ms |  |  |" in table
    assert "On the other 1 points the median error is 30 %" in table
    assert "the largest +30 %; 0 are within 20 %." in table


def test_predicted_table_is_the_one_of_the_documentation(capsys):
    assert program.main(["--predict"]) == []
    table = capsys.readouterr().out.strip()
    assert table in (child.ROOT / "docs/scaling.md").read_text()
