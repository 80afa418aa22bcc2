"""Kills of this process at exact points of its run."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import signal
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.trainer import StandardTrainer

Strike = Callable[[], None]
Wrap = Callable[[Callable[..., Any], int, Strike], Callable[..., Any]]
POINTS = "start, step:K, save:N, eval:N"


@contextlib.contextmanager
def killing(when: str, *, by: signal.Signals | None = signal.SIGKILL) -> Iterator[None]:
    """Sends this process a signal, once, at a point of the run inside the `with` block.

        with faults.killing("step:33", by=signal.SIGTERM):
            ctl.main.run(["ctl", "--config=experiments/mnist.py"])

    The points are the same in every run of one command:

    - `start`: all is built and restored, and no step has been made.
    - `step:K`: the devices have finished step K, the loop that it is in goes on after a SIGTERM. A run
      that begins at step K or later does not come by.
    - `save:N`: the files of this process' N-th checkpoint are written, and its marker is not. Of
      several processes the chief alone has a marker to write.
    - `eval:N`: the first batch of this process' N-th evaluation is done.

    To end exactly there, a loop or an evaluation is cut in two, and between the halves processes wait
    for each other: in a run of several give all of them the point, and all but one `by=None`.

    Args:
        when: one of these.
        by: the signal; None for none.

    Raises:
        UsageError: there is no such point.
    """
    point, count = parse(when)
    owner, name, wrap = _PLACES[point]
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original, count, _once(by))))
    try:
        yield
    finally:
        setattr(owner, name, original)


def parse(when: str) -> tuple[str, int]:
    """A point as text -> its kind and its number.

    Raises:
        UsageError: there is no such point.
    """
    point, colon, number = when.partition(":")
    numbered = point != "start"
    whole = number.isdecimal() and int(number) > 0 if numbered else not colon
    if point not in _PLACES or not whole:
        raise UsageError(f"A kill at {when!r}: want one of {POINTS}, numbers from 1.")
    return point, int(number or 0)


def _once(by: signal.Signals | None) -> Strike:
    waiting = [] if by is None else [by]

    def strike() -> None:
        if waiting:
            os.kill(os.getpid(), waiting.pop())

    return strike


def _at_start(original: Callable[..., Any], count: int, strike: Strike) -> Callable[..., Any]:
    def train(trainer: StandardTrainer, num_steps: tf.Tensor) -> Any:
        strike()
        return original(trainer, num_steps)

    return train


def _at_step(original: Callable[..., Any], count: int, strike: Strike) -> Callable[..., Any]:
    def train(trainer: StandardTrainer, num_steps: tf.Tensor) -> Any:
        before, steps = count - int(trainer.global_step.numpy()), int(num_steps)
        if not 0 < before <= steps:
            return original(trainer, num_steps)
        outputs = original(trainer, tf.constant(before, tf.int32))
        strike()
        rest = steps - before
        return original(trainer, tf.constant(rest, tf.int32)) if rest else outputs

    return train


def _in_save(original: Callable[..., Any], count: int, strike: Strike) -> Callable[..., Any]:
    calls = iter(range(1, count + 1))

    def commit(files: CheckpointFiles, step: int) -> None:
        if next(calls, None) == count:
            strike()
        original(files, step)

    return commit


def _in_eval(original: Callable[..., Any], count: int, strike: Strike) -> Callable[..., Any]:
    calls = iter(range(1, count + 1))

    def create(evaluator: StandardEvaluator, has_state: bool) -> Any:
        run = original(evaluator, has_state)

        def loop(iterator: Any, num_steps: tf.Tensor, **state: Any) -> Any:
            steps = int(num_steps)
            if next(calls, None) != count:
                return run(iterator, num_steps, **state)
            first = run(iterator, tf.constant(1, tf.int32), **state)
            strike()
            if steps == 1:
                return first
            if has_state:
                state["state"] = first
            return run(iterator, tf.constant(max(steps - 1, -1), tf.int32), **state)

        return loop

    return create


_PLACES: dict[str, tuple[type, str, Wrap]] = {
    "start": (StandardTrainer, "train", _at_start),
    "step": (StandardTrainer, "train", _at_step),
    "save": (CheckpointFiles, "commit", _in_save),
    "eval": (StandardEvaluator, "create_eval_loop_fn", _in_eval),
}
