"""The table of the growth of times, and the processes that measure a point."""

import collections

import pytest

from benchmarks import growth


def test_exponent_is_the_slope_of_the_logarithms_of_the_medians(monkeypatch, capsys):
    # The medians over three rounds are 3 n for ctl and 2 n**2 for the hand-written loop.
    factors = {"ctl": (3, 1, 9), "hand-written": (2, 2, 2)}
    calls = collections.Counter()

    def measure(part, program, size):
        factor = factors[program][calls[program, size]]
        calls[program, size] += 1
        return {"first": factor * size ** (1 if program == "ctl" else 2), "step": 1}

    monkeypatch.setattr(growth, "measure", measure)
    growth.main(["--parts", "variables"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "| exponent | 1.00 | 2.00 | 0.00 | 0.00 |"
    assert "| 10 | 30.00 | 200.00 | 1.00 | 1.00 |" in lines


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("program", growth.PROGRAMS)
@pytest.mark.parametrize("part", growth.SIZES)
def test_process_measures_a_point(part, program):
    assert growth.measure(part, program, 2).keys() == growth.COLUMNS.keys()
