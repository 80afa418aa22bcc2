"""Each variant trains in windows, and counts its steps and seconds."""

import io
import itertools
import json
import types

import pytest

from benchmarks import models, variants, windows

EMPTY = models.MODELS["empty"]


OTHERS = (variants.TUTORIAL, variants.OWN_LOOP, "tf_keras fit", "tf_keras fit, best options")


@pytest.mark.parametrize(
    "name",
    [
        f"{variants.CTL}off",
        variants.LOOP,
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_worker_answers_each_window_with_steps_and_seconds(name, monkeypatch):
    answers, clock = io.StringIO(), itertools.count()
    # Each reading of the clock is a hundredth of a second later.
    monkeypatch.setattr(
        windows, "time", types.SimpleNamespace(perf_counter=lambda: next(clock) / 100)
    )
    with pytest.raises(windows.Done):
        variants.run(name, EMPTY, windows.Windows(io.StringIO("0\n0.05\n"), answers))
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert first["steps"] in (1, EMPTY.steps_per_loop)
    assert second["steps"] > 1 and second["seconds"] >= 0.05
    assert second["peak_mib"] > 100
