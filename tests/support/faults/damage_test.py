"""A run skips damaged checkpoints, reports them, and ends with the same bits."""

import shutil

import numpy as np
import pytest

from ctl import main
from tests.support.experiments import read_weights
from tests.support.faults import damage


def continue_run(capsys, workdir):
    """Continues a copy of the undisturbed run to step 35; returns what it prints and its weights."""
    flags = ("--config=experiment.py", f"--workdir={workdir}", "--config.train.steps=35")
    code, out = main.run(["ctl", *flags]), capsys.readouterr().out
    assert code == 0, out
    return out, read_weights(workdir, 35)


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped_and_reported(undisturbed, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(undisturbed)
    for name in ("whole", "damaged"):
        shutil.copytree("undisturbed", tmp_path / name)
    folder = tmp_path / "damaged/checkpoints"
    assert damage.flip(folder, 20) == folder / "ckpt-20.data-00000-of-00001"
    damage.truncate(folder, 30, ".index")
    damage.leave_unfinished(folder, 40)
    out, weights = continue_run(capsys, tmp_path / "damaged")
    messages = sorted(line for line in out.splitlines() if line.startswith("Skipped"))
    faulty = {20: "hecksum", 30: "bytes, not", 40: "it was not written to the end"}
    for line, (step, fault) in zip(messages, faulty.items(), strict=True):
        assert line.startswith(f"Skipped {folder}/ckpt-{step}: ") and fault in line
    assert f"Resumed from {folder}/ckpt-10." in out
    _, expected = continue_run(capsys, tmp_path / "whole")
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[k], expected[k]) for k in weights)
