"""A run skips a damaged checkpoint, reports it, and ends with the same bits."""

import os
import shutil

import numpy as np
import pytest

from ctl import main
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.experiments import read_weights

DATA = "data-00000-of-00001"


def file_of(folder, step, suffix):
    return folder / f"ckpt-{step}.{suffix}"


def truncate(folder, step, suffix=DATA):
    path = file_of(folder, step, suffix)
    os.truncate(path, path.stat().st_size // 2)


def delete(folder, step, suffix=DATA):
    file_of(folder, step, suffix).unlink()


def flip(folder, step, suffix=DATA):
    """Inverts the byte in the middle of a file."""
    path = file_of(folder, step, suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def leave_unfinished(folder, step):
    """Creates the temporary folder that a kill during a save leaves."""
    (folder / f"ckpt-{step}_temp").mkdir()


UNFINISHED = "it was not written to the end"
# Of the checkpoints of steps 20 and 30, and one that was begun after them.
DAMAGES = [
    {
        30: (lambda f: truncate(f, 30), "bytes, not"),
        20: (lambda f: truncate(f, 20, "index"), "bytes, not"),
    },
    {
        30: (lambda f: truncate(f, 30, "whole"), "its marker cannot be read"),
        20: (lambda f: delete(f, 20), "ckpt-20.data-00000-of-00001 is missing"),
    },
    {
        30: (lambda f: delete(f, 30, "index"), "ckpt-30.index is missing"),
        20: (lambda f: delete(f, 20, "whole"), UNFINISHED),
    },
    {
        30: (lambda f: flip(f, 30), "hecksum"),
        20: (lambda f: flip(f, 20, "index"), "hecksum"),
    },
    {
        40: (lambda f: leave_unfinished(f, 40), UNFINISHED),
        30: (lambda f: flip(f, 30, "whole"), "its marker cannot be read"),
    },
]


def continue_run(workdir):
    """Continues a copy of the undisturbed run to step 35; returns its exit code."""
    return main.run(
        ["ctl", "--config=experiment.py", f"--workdir={workdir}", "--config.train.steps=35"]
    )


@pytest.fixture(scope="module")
def weights_at_step_35(undisturbed):
    before = os.getcwd()
    os.chdir(undisturbed)
    try:
        shutil.copytree("undisturbed", "longer")
        assert continue_run("longer") == 0
        return read_weights("longer", 35)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (i in (1, 3)))
        for i, each in enumerate(DAMAGES)
    ],
    ids=[f"damages{i}" for i in range(len(DAMAGES))],
)
def test_damaged_checkpoints_are_skipped_and_reported(
    undisturbed, weights_at_step_35, damages, monkeypatch, capsys, tmp_path
):
    workdir = tmp_path / "run"
    monkeypatch.chdir(undisturbed)
    shutil.copytree("undisturbed", workdir)
    for damage, _ in damages.values():
        damage(workdir / "checkpoints")
    code = continue_run(workdir)
    out, _ = capsys.readouterr()
    assert code == 0, out
    messages = [line for line in out.splitlines() if line.startswith("Skipped")]
    assert len(messages) == len(damages)
    for step, (_, fault) in damages.items():
        start = f"Skipped {workdir}/checkpoints/ckpt-{step}: "
        assert any(line.startswith(start) and fault in line for line in messages), messages
    assert f"Resumed from {workdir}/checkpoints/ckpt-{min(damages) - 10}." in out
    weights = read_weights(workdir, 35)
    assert weights.keys() == weights_at_step_35.keys()
    assert all(np.array_equal(weights[k], weights_at_step_35[k]) for k in weights)


def test_undamaged_run_has_three_checkpoints(undisturbed):
    assert CheckpointFiles(undisturbed / "undisturbed/checkpoints").steps() == [10, 20, 30]
