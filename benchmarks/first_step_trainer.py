"""The trainer of experiments/mnist.py; its process ends after the first loop, and prints the time."""

import json
import os
import time

import ctl
from experiments.trainers.mnist import MnistTrainer


class FirstStepTrainer(MnistTrainer):
    def build_actions(self):
        return [End()]


class End(ctl.Action):
    """Prints the time of the monotonic clock and ends the process."""

    at = "train"

    def __call__(self, outputs):
        print(json.dumps([time.monotonic(), None]), flush=True)
        os._exit(0)
