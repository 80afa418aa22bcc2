"""A process that trains one variant in the windows that `benchmarks.loops` requests.

    python -m benchmarks.worker VARIANT MODEL

It reads the seconds of each window as a line from stdin, trains at least that long, and answers with
a line of JSON: steps, seconds, and the peak memory of the process. It ends at the end of stdin.

The peak memory is VmHWM, because `ru_maxrss` starts at the value of the parent process.
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
    """The parent requests no more windows."""


class Windows:
    """Divides endless training into windows; the training pauses between two of them."""

    def __init__(self, requests, answers):
        self.sync = lambda: None
        self._requests, self._answers = requests, answers
        self._wait_for_request()

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
        self._wait_for_request()

    def _wait_for_request(self) -> None:
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
    os.dup2(
        sys.stderr.fileno(), sys.stdout.fileno()
    )  # keeps the output of frameworks out of the answers
    tf.get_logger().setLevel("ERROR")
    try:
        variants.run(name, models.MODELS[model], Windows(sys.stdin, answers))
    except Done:
        answers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
