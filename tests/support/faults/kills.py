"""Kills this process at an exact point of its run."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import signal
from typing import Any
from unittest import mock

import tensorflow as tf

from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.trainer import StandardTrainer

Send = Callable[[], None]
Wrap = Callable[[Callable[..., Any], int, Send], Callable[..., Any]]
POINTS = "start, step:K, save:N, eval:N"


@contextlib.contextmanager
def killing(when: str, *, by: signal.Signals | None = signal.SIGKILL) -> Iterator[None]:
    """Sends this process a signal once, at a point of the run inside the `with` block.

        with kills.killing("step:33", by=signal.SIGTERM):
            ctl.main.run(["ctl", "--config=experiments/mnist.py"])

    The points are the same in every run of a command:

    - `start`: everything is built and restored, before the first step.
    - `step:K`: the devices have finished step K. After a SIGTERM its inner loop continues to its end.
      A run that starts at step K or later does not reach this point.
    - `save:N`: the files of this process' N-th checkpoint are written, but not its marker. With
      several processes only the chief writes a marker.
    - `eval:N`: this process' N-th evaluation begins.

    To stop after a step, the inner loop is split in two, and the processes of a run synchronize between
    the two parts: pass the same point in all processes, and `by=None` in all but one.

    Args:
        when: the point.
        by: the signal; None to send none.

    Raises:
        UsageError: there is no such point.
    """
    point, count = parse(when)
    cls, name, wrap = _METHODS[point]
    original = getattr(cls, name)
    wrapped = functools.wraps(original)(wrap(original, count, _send_once(by)))
    with mock.patch.object(cls, name, wrapped):  # leaves no copy of an inherited method behind
        yield


def parse(when: str) -> tuple[str, int]:
    """Splits the text of a point into its kind and its number.

    Raises:
        UsageError: there is no such point.
    """
    point, colon, number = when.partition(":")
    valid = not colon if point == "start" else number.isdecimal() and int(number) > 0
    if point not in _METHODS or not valid:
        raise UsageError(
            f"The point of a kill is {when!r}, but must be one of {POINTS}, with numbers from 1."
        )
    return point, int(number or 1)


def _send_once(by: signal.Signals | None) -> Send:
    pending = [] if by is None else [by]

    def send() -> None:
        if pending:
            os.kill(os.getpid(), pending.pop())

    return send


def _before_call(original: Callable[..., Any], count: int, send: Send) -> Callable[..., Any]:
    calls = iter(range(1, count + 1))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) == count:
            send()
        return original(*arguments, **options)

    return call


def _at_step(original: Callable[..., Any], count: int, send: Send) -> Callable[..., Any]:
    def train(trainer: StandardTrainer, num_steps: tf.Tensor) -> Any:
        steps = int(num_steps)
        first = count - int(trainer.global_step.numpy())
        if not 0 < first <= steps:
            return original(trainer, num_steps)
        outputs = original(trainer, tf.constant(first, tf.int32))
        send()
        rest = steps - first
        return original(trainer, tf.constant(rest, tf.int32)) if rest else outputs

    return train


_METHODS: dict[str, tuple[type, str, Wrap]] = {
    "start": (StandardTrainer, "train", _before_call),
    "step": (StandardTrainer, "train", _at_step),
    "save": (CheckpointFiles, "commit", _before_call),
    "eval": (StandardEvaluator, "evaluate", _before_call),
}
