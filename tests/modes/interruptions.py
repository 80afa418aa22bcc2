"""Actions that interrupt a run or end its process, for the tests of this folder."""

import os
import pathlib
import signal

import ctl


class Stopping(ctl.Action):
    """Sends a signal to this process at a step, as a user or a system does."""

    at = "train"

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def __call__(self, outputs):
        if self.controller.step == self.step:
            os.kill(os.getpid(), self.number)


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
