"""python -m tests.support.faults: the complete program, killed at a point, and its next run."""

import signal

import numpy as np
import pytest

from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support import child, experiments


def check_same_weights(folder, name, step=30):
    expected = experiments.read_weights(folder / "undisturbed", step)
    weights = experiments.read_weights(folder / name, step)
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "events", "newest"),
    [
        ("start", [("start", 0)], 0),
        ("step:13", [("start", 0), ("checkpoint", 10)], 10),
        # With blocking writes the event of a checkpoint follows its marker.
        ("save:2", [("start", 0), ("checkpoint", 10), ("eval", 15)], 10),
        ("eval:1", [("start", 0), ("checkpoint", 10)], 10),
    ],
)
def test_killed_program_continues_to_the_same_bits(undisturbed, when, events, newest):
    workdir = undisturbed / when.replace(":", "-")
    run = [
        "--config=experiment.py",
        f"--workdir={workdir.name}",
        "--config.train.checkpoint_writing=blocking",
    ]
    killed = child.run(
        ["-m", "tests.support.faults", f"--kill={when}", "--", *run], cwd=undisturbed
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert experiments.read_events(workdir) == events
    assert max(CheckpointFiles(workdir / "checkpoints").steps(), default=0) == newest
    rerun = child.run(["-m", "ctl.main", *run], cwd=undisturbed)
    assert rerun.returncode == 0, rerun.stderr
    assert ("Resumed from" in rerun.stdout) == bool(newest)
    check_same_weights(undisturbed, workdir.name)


@pytest.mark.slow
def test_sigterm_at_a_step_saves_at_the_end_of_its_inner_loop(undisturbed):
    run = ["--config=experiment.py", "--workdir=term"]
    command = ["-m", "tests.support.faults", "--kill=step:13", "--signal=SIGTERM", "--", *run]
    stopped = child.run(command, cwd=undisturbed)
    assert stopped.returncode == 75, stopped.stderr
    assert experiments.read_events(undisturbed / "term")[-2:] == [("checkpoint", 15), ("stop", 15)]
    assert child.run(["-m", "ctl.main", *run], cwd=undisturbed).returncode == 0
    check_same_weights(undisturbed, "term")
