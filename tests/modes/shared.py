"""What the tests of this folder share: actions that interrupt a run or end its process."""

import os
import pathlib
import signal

import ctl

# The config of a run that ends early: its loss falls, so that the first evaluation is the "best" one.
STOPPING = {
    "train.best.metric": "eval/loss", "train.best.mode": "max",
    "train.best.patience": 1, "train.best.restore": True,
}  # fmt: skip


class Stopping(ctl.Action):
    """Sends a signal to this process at a step, as a user or a system does."""

    at = "train"

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def __call__(self, outputs):
        if self.controller.step == self.step:
            os.kill(os.getpid(), self.number)


def read_files():
    """Returns the time and the content of each file below the current folder."""
    files = [path for path in pathlib.Path(".").rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


class Killed(BaseException):
    """The end of the process, which runs no further code of the run."""


class Killing(ctl.Action):
    """Ends the first process of the current folder when the actions end."""

    def __call__(self, outputs):
        pass

    def end(self):
        ended = pathlib.Path("killed")
        if not ended.exists():
            ended.touch()
            raise Killed
