"""Kills this process at an exact point of its run."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import signal
from typing import Any
from unittest import mock

import tensorflow as tf

from ctl.evaluator import StandardEvaluator
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.trainer import StandardTrainer

Send = Callable[[], None]
Wrap = Callable[[Callable[..., Any], int, Send], Callable[..., Any]]


@contextlib.contextmanager
def killing(when: str, *, by: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    """Sends this process a signal once, at a point of the run inside the `with` block.

        with kills.killing("step:33", by=signal.SIGTERM):
            ctl.main.run(["ctl", "--config=experiments/mnist.py"])

    The points are the same in every run of a command:

    - `step:K`: the devices have finished step K. After a SIGTERM its inner loop continues to its end.
      A run that starts at step K or later does not reach this point.
    - `save:N`: the files of this process' N-th checkpoint are written, but not its marker.
    - `eval:N`: this process' N-th evaluation begins.

    Args:
        when: the point.
        by: the signal.
    """
    point, _, number = when.partition(":")
    cls, name, wrap = _METHODS[point]
    original = getattr(cls, name)
    wrapped = functools.wraps(original)(wrap(original, int(number), _send_once(by)))
    with mock.patch.object(cls, name, wrapped):  # leaves no copy of an inherited method behind
        yield


def _send_once(by: signal.Signals) -> Send:
    pending = [by]

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
    "step": (StandardTrainer, "train", _at_step),
    "save": (CheckpointFiles, "commit", _before_call),
    "eval": (StandardEvaluator, "evaluate", _before_call),
}
