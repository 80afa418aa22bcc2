"""A run of two workers that wait at a step until they are told to go on, to be stopped or killed."""

import sys

from ctl import main
from tests.support import child, experiments

CONFIG = "experiments/mnist_multi_worker.py"
# Both workers wait at step 15, between two checkpoints, as long as there is a file `pause`.
EXPERIMENT = """\
import os
import pathlib
import time

PAUSE = pathlib.Path(__file__).with_name("pause")


class Pause(ctl.Action):
    at = "train"
    everywhere = True
    may_stop = False

    def __call__(self, outputs):
        if self.controller.step != 15 or not PAUSE.exists():
            return
        started = PAUSE.with_name(f"paused-{int(not self.controller.is_chief)}")
        started.with_suffix(".new").write_text(str(os.getpid()))
        started.with_suffix(".new").rename(started)
        while PAUSE.exists():
            time.sleep(0.05)
"""
EDITS = {
    "experiment.py:Trainer": "mnist_multi_worker.py:Trainer",
    "model=dict(dropout=0.3),": 'model=dict(dropout=0.3), actions=["mnist_multi_worker.py:Pause"],',
}


class Folder:
    """A checkout with one experiment, whose workers can be paused.

    Attributes:
        path: the folder.
        expected: the weights of an undisturbed run of two replicas in one process.
    """

    def __init__(self, path):
        self.path = path
        text = experiments.DROPOUT + EXPERIMENT
        for old, new in EDITS.items():
            assert old in text
            text = text.replace(old, new)
        experiments.write(path, {CONFIG: text, "experiments/mnist.py": text})
        (path / ".venv").symlink_to(sys.prefix)
        config, workdir = f"--config={path / CONFIG}", f"--workdir={path / 'runs/expected'}"
        replicas = ["--config.runtime.strategy=mirrored", "--config.runtime.logical_devices=2"]
        assert main.run(["ctl", config, workdir, *replicas]) == 0
        self.expected = experiments.read_weights(path / "runs/expected")

    def pause(self):
        """Lets the next run wait at step 15."""
        for name in ("paused-0", "paused-1"):
            (self.path / "experiments" / name).unlink(missing_ok=True)
        (self.path / "experiments/pause").touch()

    def go_on(self):
        (self.path / "experiments/pause").unlink()

    def wait_until_paused(self, run=None):
        """Returns the pids of the two workers once both wait; fails if the process `run` has ended."""
        paths = [self.path / f"experiments/paused-{i}" for i in range(2)]

        def are_paused():
            assert run is None or run.poll() is None, run.communicate()
            return all(path.exists() for path in paths)

        child.wait_for(are_paused)
        return [int(path.read_text()) for path in paths]

    def check(self, name):
        """Asserts that a run resumed from step 10 and has the expected bits."""
        events = experiments.read_events(self.path / "runs" / name)
        assert ("start", 0) in events and events[-1] == ("end", 30), events
        weights = experiments.read_weights(self.path / "runs" / name)
        experiments.check_same(weights, self.expected)
        return events
