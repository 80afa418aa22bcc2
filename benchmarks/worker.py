"""One process that trains one variant, in the windows that `benchmarks.loops` asks for.

    python -m benchmarks.worker VARIANT MODEL

It reads seconds from stdin, a line a window, trains at least so long, and answers each with a line
of JSON: steps, seconds, and the process' peak memory. The end of stdin ends it.

The peak is VmHWM: `ru_maxrss`, the same number, starts at that of the process that started this one.
"""

import json
import os
import pathlib
import re
import sys
import time

import tensorflow as tf

from benchmarks import models, variants


class Done(Exception):
    """The parent asked for no more windows."""


class Windows:
    """Cuts a training that never ends into windows; between two of them it stands still."""

    def __init__(self, requests, answers):
        self.sync = lambda: None
        self._requests, self._answers = requests, answers
        self._await()

    def __call__(self, steps: int) -> None:
        self._steps += steps
        if time.perf_counter() < self._end:
            return
        self.sync()
        answer = {
            "steps": self._steps,
            "seconds": time.perf_counter() - self._start,
            "peak_mib": peak_mib(),
        }
        print(json.dumps(answer), file=self._answers, flush=True)
        self._await()

    def _await(self) -> None:
        request = self._requests.readline()
        if not request:
            raise Done
        self._steps, self._start = 0, time.perf_counter()
        self._end = self._start + float(request)


def peak_mib() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def main(name: str, model: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a framework prints is no answer
    tf.get_logger().setLevel("ERROR")
    try:
        variants.run(name, models.MODELS[model], Windows(sys.stdin, answers))
    except Done:
        answers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
