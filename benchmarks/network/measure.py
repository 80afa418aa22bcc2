"""Measures steps of several workers on simulated hosts, at several rates of their links."""

from collections.abc import Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.network.cost_model import CostModel, Measurement
from benchmarks.network.namespaces import Hosts

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WINDOW_SECONDS = 1.5  # the aim for a window; its number of steps is a rough estimate
_MAX_STEPS = 50
# Only to choose the number of steps of a window.
_ROUGHLY = CostModel(overhead=1.2, latency=2e-3)
_UNLIMITED = 10_000.0


def measure(
    model: str, workers: int, rates: Sequence[float | None], windows: int
) -> list[Measurement]:
    """Trains a model on simulated hosts; returns one measurement per rate.

    Windows of steps with and without the all-reduce alternate, at each rate in turn, in the same
    processes. All workers compute at the same time in both kinds, so the time for computing includes the
    slowdown of sharing the CPU cores of this machine. The result is the median over the windows.

    Args:
        model: a name of `benchmarks.network.models.MODELS`.
        workers: the number of hosts, with one worker each.
        rates: Mbit/s of each link; None for no limit.
        windows: the number of windows of each kind per rate.

    Returns:
        The measurements, in the order of `rates`.
    """
    with Hosts(workers) as hosts:
        processes = hosts.start(
            [sys.executable, "-m", "benchmarks.network.worker", model],
            environment={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        gradient_bytes = 4 * _answers(processes)[0]["parameters"]  # float32
        cluster = _Cluster(hosts, processes, gradient_bytes)
        rounds = np.array([[cluster.window(rate) for rate in rates] for _ in range(windows)])
    medians = np.median(rounds, axis=0).tolist()
    return [
        Measurement(model, gradient_bytes, workers, rate, *values)
        for rate, values in zip(rates, medians, strict=True)
    ]


class _Cluster:
    """The workers that are being measured."""

    def __init__(self, hosts: Hosts, processes: list[subprocess.Popen], gradient_bytes: int):
        self._hosts, self._processes = hosts, processes
        self._workers, self._bytes = len(processes), gradient_bytes
        self._rate: float | None = None

    def window(self, rate: float | None) -> tuple[float, float, float]:
        """Measures steps without and with all-reduces.

        Args:
            rate: Mbit/s of each link; None for no limit.

        Returns:
            The seconds of computing and of a step, and the bytes that each worker sent per step. The
            bytes of steps without all-reduces are subtracted: they are TensorFlow's health checks, and
            the average of the loss at the end of a window.
        """
        if rate != self._rate:
            self._hosts.limit(rate)
            self._rate = rate
        reducing = _ROUGHLY.reducing(self._workers, self._bytes, rate or _UNLIMITED)
        steps = min(_MAX_STEPS, 1 + int(_WINDOW_SECONDS / reducing))
        computing, baseline = self._train("compute", steps)
        seconds, sent = self._train("reduce", steps)
        return computing / steps, seconds / steps, (sent - baseline) / steps

    def _train(self, mode: str, steps: int) -> tuple[float, float]:
        """Returns the seconds of some steps, and the bytes that each worker sent."""
        before = self._hosts.sent_bytes()
        for process in self._processes:
            process.stdin.write(f"{mode} {steps}\n")
            process.stdin.flush()
        seconds = max(answer["seconds"] for answer in _answers(self._processes))
        time.sleep(0.1)  # until the last acknowledgments have been counted
        sent = statistics.mean(self._hosts.sent_bytes()) - statistics.mean(before)
        return seconds, sent


def _answers(processes: list[subprocess.Popen]) -> list[dict]:
    lines = [process.stdout.readline() for process in processes]
    if not all(lines):
        raise SystemExit("A worker has failed; its error is above.")
    return [json.loads(line) for line in lines]
