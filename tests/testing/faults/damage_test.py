"""A run skips a damaged checkpoint, reports it, and ends with the same bits."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import ctl
from ctl import main
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.testing import faults
from tests import child
from tests.experiments import read_weights

UNFINISHED = "it was not written to the end"
# Of the checkpoints of steps 20 and 30, and one that was begun after them.
DAMAGES = [
    {
        30: (lambda f: faults.truncate(f, 30), "bytes, not"),
        20: (lambda f: faults.truncate(f, 20, "index"), "bytes, not"),
    },
    {
        30: (lambda f: faults.truncate(f, 30, "marker"), "its marker cannot be read"),
        20: (lambda f: faults.delete(f, 20), "ckpt-20.data-00000-of-00001 is missing"),
    },
    {
        30: (lambda f: faults.delete(f, 30, "index"), "ckpt-30.index is missing"),
        20: (lambda f: faults.delete(f, 20, "marker"), UNFINISHED),
    },
    {
        30: (lambda f: faults.flip(f, 30), "hecksum"),
        20: (lambda f: faults.flip(f, 20, "index"), "hecksum"),
    },
    {
        40: (lambda f: faults.leave_unfinished(f, 40), UNFINISHED),
        30: (lambda f: faults.flip(f, 30, "marker"), "its marker cannot be read"),
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
        pytest.param(each, marks=[pytest.mark.slow] * (i in (1, 2, 3)))
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


@pytest.fixture
def checkpoints(tmp_path):
    """A folder with three files that have the names of a checkpoint's."""
    for suffix in ("data-00000-of-00001", "index", "whole"):
        (tmp_path / f"ckpt-20.{suffix}").write_bytes(bytes(range(200)))
    return tmp_path


def test_flipping_a_byte_twice_restores_it(checkpoints):
    path = checkpoints / "ckpt-20.data-00000-of-00001"
    before = path.read_bytes()
    assert faults.flip(checkpoints, 20) == path
    pairs = enumerate(zip(before, path.read_bytes(), strict=True))
    assert [i for i, (old, new) in pairs if old != new] == [100]
    faults.flip(checkpoints, 20)
    assert path.read_bytes() == before


def test_impossible_damage_is_an_error_and_changes_nothing(checkpoints):
    with pytest.raises(ctl.UsageError, match="ckpt-7 has no index file"):
        faults.delete(checkpoints, 7, "index")
    with pytest.raises(ctl.UsageError, match="part is 'body'"):
        faults.delete(checkpoints, 20, "body")
    assert {path.read_bytes() for path in checkpoints.iterdir()} == {bytes(range(200))}


def test_undamaged_run_has_three_checkpoints(undisturbed):
    assert CheckpointFiles(undisturbed / "undisturbed/checkpoints").steps() == [10, 20, 30]


def test_damage_and_processes_do_not_import_tensorflow():
    program = (
        "import sys; from ctl.testing import faults; faults.flip, faults.drop; "
        "assert not [name for name in sys.modules if name.startswith('tensorflow')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=child.ROOT)
