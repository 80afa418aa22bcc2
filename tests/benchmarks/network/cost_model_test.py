"""The model of a step's cost, by numbers that are computed by hand."""

import dataclasses

import pytest

from benchmarks.network import __main__ as program
from benchmarks.network import predictions
from benchmarks.network.cost_model import CostModel, Measurement, fit, rounds, sent_bytes
from tests.support import child

# 1,000,000 bytes between 4 workers: 6 rounds of 250,000 bytes. At 10 Mbit/s each takes 0.2 s.
POINT = Measurement(
    "a model", gradient_bytes=1_000_000, workers=4, mbits=10, computing=0.5, step=2.0, sent=1.5e6
)


@pytest.mark.parametrize(
    ("workers", "expected_rounds", "megabytes"), [(1, 0, 0), (2, 2, 1), (3, 4, 4 / 3), (4, 6, 1.5)]
)
def test_ring_sends_a_chunk_per_round(workers, expected_rounds, megabytes):
    assert rounds(workers) == expected_rounds
    assert sent_bytes(workers, 1e6) == pytest.approx(megabytes * 1e6)


def test_reducing_is_the_transfer_with_its_overhead_and_a_latency_per_round():
    assert CostModel(1.0, 0.0).reducing(4, 1e6, 10) == pytest.approx(1.2)
    assert CostModel(1.1, 0.0).reducing(4, 1e6, 10) == pytest.approx(1.32)
    assert CostModel(1.1, 0.01).reducing(4, 1e6, 10) == pytest.approx(1.38)
    assert CostModel(1.1, 0.01).step(POINT) == pytest.approx(1.88)
    assert POINT.reducing == 1.5
    assert CostModel(1.1, 0.01).reducing(1, 1e6, 10) == 0
    with pytest.raises(ValueError, match="rate"):
        CostModel(1.0, 0.0).step(dataclasses.replace(POINT, mbits=None))


def test_fit_returns_the_model_that_the_points_were_computed_with():
    exact = CostModel(1.25, 0.003)
    shapes = [(2, 900_000, 1000), (4, 20_000_000, 50)]
    points = []
    for workers, size, rate in shapes:
        step = 0.5 + exact.reducing(workers, size, rate)
        point = Measurement("a model", size, workers, rate, computing=0.5, step=step, sent=1.0)
        points.append(point)
    fitted = fit(points)
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
    assert table == predictions.table()
    assert table in (child.ROOT / "docs/scaling.md").read_text()


def test_prediction_of_a_step_by_hand():
    # 8 workers send 14 / 8 of 102.4 MB. At 1 Gbit/s this takes 1.4336 s, and 14 rounds take 14 ms.
    lines = predictions.table(CostModel(1.0, 1e-3)).splitlines()
    row = next(line for line in lines if "ResNet" in line)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:5] == ["ResNet-50, 25.6 M", "44 ms", "8", "179.2 MB", "14 ms"]
    assert cells[5] == "1.49 s (3 %)"
