"""Trainers that tests use one after the other, so that each is traced once."""

from collections.abc import Callable
import functools

import tensorflow as tf

from ctl.replica.step.engine import engine_of


def share(build: Callable) -> Callable:
    """Caches the trainers that `build` makes; a call gives all variables their first values again."""

    @functools.cache
    def build_once(*arguments, **options):
        trainer = build(*arguments, **options)
        results = engine_of(trainer).step.results
        results.measure_waiting()
        results.measure_waiting = lambda: None  # each Controller would drop the trace
        root = tf.train.Checkpoint(**trainer.checkpoint_items())
        variables = [v for v in tf.train.TrackableView(root).descendants() if hasattr(v, "assign")]
        return trainer, [(variable, variable.numpy()) for variable in variables]

    @functools.wraps(build)
    def make(*arguments, **options):
        trainer, values = build_once(*arguments, **options)
        for variable, value in values:
            variable.assign(value)
        return trainer

    make.cache_clear = build_once.cache_clear  # tests/conftest.py calls it at the end of a file
    return make
