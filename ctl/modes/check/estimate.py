"""Estimates how long the checks take, from the first two steps of a trainer."""

import os

from ctl.modes.check.trainer_factory import FirstSteps, TrainerFactory
from ctl.replica.step.engine import engine_of

_READS = 12  # batches that the checks of the data read
_FURTHER_REPLICA = 0.6  # of the seconds for tracing the first replica
# Cost of the comparison on 1, 2 and 4 replicas, in units of building and tracing on one replica.
_COST = 3.0 + 3.0 + 5.0


def announce(factory: TrainerFactory, *, startup: float) -> str:
    """Returns the line that is printed before the checks: the trainer, and about how long they take.

    Args:
        factory: makes trainers of the experiment.
        startup: seconds of processor time to start Python and to import TensorFlow, which the process
            of the comparison does too.
    """
    trainer = factory.experiment.config.trainer
    try:
        first = factory.first_steps
    except Exception:  # a check reports it
        return f"Checking {trainer}."
    seconds = estimate(factory, first, startup=startup)
    return f"Checking {trainer}, which takes about {seconds:.0f} seconds."


def estimate(factory: TrainerFactory, first: FirstSteps, *, startup: float) -> float:
    """Estimates the seconds of all checks; see `announce` for the arguments."""
    here = _seconds_here(factory, first)
    there = startup + seconds_of_comparison(factory, first)
    return max(here, there) if (os.cpu_count() or 1) > 1 else here + there


def _seconds_here(factory: TrainerFactory, first: FirstSteps) -> float:
    """Estimates the checks in this process, which read data, evaluate, and train three trainers."""
    trainer, evaluator = factory.experiment.trainer, factory.experiment.evaluator
    batch, batches = 0, 0
    if evaluator is not None:
        batch, pipeline = evaluator.global_batch_size, engine_of(trainer).pipeline
        batches = sum(pipeline.evaluation_steps(batch, split) or 0 for split in evaluator.splits)
    # A forward pass takes about a third of a step.
    evaluation = 0.5 * first.trace + batches * first.step / 3 * batch / factory.global_batch_size
    trained = 3 * (first.build + first.trace) + 100 * first.step
    return _READS * first.read + evaluation + trained


def seconds_of_comparison(factory: TrainerFactory, first: FirstSteps) -> float:
    """Estimates the comparison in its own process: it traces each replica of a trainer per split."""
    replicas = factory.experiment.hardware.strategy.num_replicas_in_sync
    one_replica = first.trace / (1 + _FURTHER_REPLICA * (replicas - 1))
    return _COST * (first.build + one_replica)
