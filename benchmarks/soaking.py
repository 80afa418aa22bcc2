"""The experiment of benchmarks.soak: benchmarks.counting with a pause after each inner loop."""

import time

from benchmarks import counting
import ctl


class Pause(ctl.Action):
    """Waits, so that a run of an hour leaves most of the processor to other programs."""

    at = "train"
    everywhere = True

    def __init__(self, seconds):
        self._seconds = seconds

    def __call__(self, outputs):
        time.sleep(self._seconds)


def get_config():
    config = counting.get_config()
    config.trainer = "counting.py:CountingTrainer"
    config.actions = [dict(name="soaking.py:Pause", seconds=0.25)]
    return config
