"""A step whose loss or gradients are not finite is reported and, under `skip`, not applied."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.errors import NonFiniteStep
from ctl.replica.graphs.assignments import OPTIMIZER_UPDATE
from tests.support import reference_model
from tests.support.faulty_trainers import BAD, BATCH, batch_of, poisoned, same, state
from tests.support.optimized_graph import ancestors, optimized_nodes


@functools.cache
def state_without_the_bad_step():
    """The end of a run that never computes the step BAD."""
    trainer = poisoned(1, -1)
    trainer.train(tf.constant(BAD))
    trainer.global_step.assign(BAD + 1)
    trainer.train(tf.constant(2))
    return state(trainer)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("replicas", "row", "options"),
    [
        (2, 5, {}),
        pytest.param(1, 7, {"xla": "loop"}, marks=SLOW),
        pytest.param(4, 6, {"xla": "gradients", "micro_batches": 2}, marks=SLOW),
        pytest.param(2, 5, {"logical_shards": 4}, marks=SLOW),
    ],
)
def test_skip_applies_the_step_on_no_replica(replicas, row, options):
    trainer = poisoned(replicas, row, on_non_finite="skip", **options)
    trainer.train(tf.constant(BAD))
    before = state(trainer)
    trainer.train(tf.constant(1))
    same(state(trainer), before)
    report = trainer.non_finite_report
    assert (report.step, report.tensor, report.count) == (BAD, "the loss", 1)
    assert trainer.global_step.numpy() == BAD + 1 and trainer.optimizer.iterations.numpy() == BAD
    outputs = trainer.train(tf.constant(2))
    assert trainer.non_finite_report is None and np.isfinite(outputs["loss"])
    assert outputs["skipped_steps"] == 1
    same(state(trainer), state_without_the_bad_step(), 1e-10)
    for variable in trainer.model.variables:
        first, *rest = testing.copies(testing.make_strategy(replicas), variable)
        same(rest, [first] * len(rest))


@SLOW
def test_recorded_step_is_read_before_it_is_incremented():
    trainer = poisoned(2, 5, on_non_finite="skip")
    nodes = optimized_nodes(lambda: trainer.train(tf.constant(1)))
    writes = {name for name in nodes if name.endswith("body/_1/update_0/AssignAddVariableOp")}
    variable = root(nodes, next(iter(writes)))
    reads = {
        name
        for name, node in nodes.items()
        if node.op == "ReadVariableOp"
        and ("/cond/" in name or f"/{OPTIMIZER_UPDATE}/" in name)
        and root(nodes, name) == variable
    }
    assert len(writes) == len(reads) == 1
    assert reads <= ancestors(nodes, *writes)


def root(nodes, name):
    """Returns the argument of the graph that is the first input of a node."""
    while nodes[name].op != "_Arg":
        name = nodes[name].input[0].lstrip("^").split(":")[0]
    return name


@pytest.mark.parametrize(
    ("replicas", "row", "options"),
    [
        (1, 7, {}),
        pytest.param(2, 7, {"xla": "gradients", "micro_batches": 2}, marks=SLOW),
    ],
)
def test_stop_names_the_step_and_its_examples(replicas, row, options):
    trainer = poisoned(replicas, row, **options)
    with pytest.raises(NonFiniteStep) as stopped:
        trainer.train(tf.constant(5))
    message = str(stopped.value)
    assert message.startswith(f"Step {BAD} is not finite: the loss is first, on the examples ")
    assert (
        f"examples {', '.join(map(str, batch_of(BAD)))}. No checkpoint was saved after it"
        in message
    )
    assert stopped.value.step == BAD


def test_stop_names_the_gradient_if_the_loss_is_finite():
    class Kinked(reference_model.ReferenceTrainer):
        """The square root has an infinite slope at zero."""

        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs) + tf.sqrt(0.0 * outputs[:, 0])

    trainer = reference_model.make_trainer(testing.make_strategy(1), BATCH, cls=Kinked)
    with pytest.raises(
        NonFiniteStep, match=r"Step 0 is not finite: the gradient of .*/.*:0 is first"
    ):
        trainer.train(tf.constant(1))


def test_finite_run_is_the_same_under_every_policy_and_ignore_applies_the_step():
    runs = []
    for policy in ("stop", "ignore"):
        trainer = poisoned(1, 0, on_non_finite=policy)
        assert "skipped_steps" not in trainer.train(tf.constant(BAD))
        runs.append(state(trainer))
    same(*runs)
    outputs = trainer.train(tf.constant(2))
    assert trainer.non_finite_report is None and np.isnan(outputs["loss"])
    assert np.isnan(state(trainer)[0]).any()


def test_overflow_is_a_failure_only_at_the_smallest_loss_scale():
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), BATCH, precision="float16", loss_scale=0.0
    )
    trainer.optimizer.loss_scale  # noqa: B018 - creates the variable
    trainer.optimizer._loss_scale._current_loss_scale.assign(2.0**40)
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 3 and trainer.non_finite_report is None
    broken = poisoned(1, 0, precision="float16")
    broken.optimizer._loss_scale._current_loss_scale.assign(1.0)
    with pytest.raises(NonFiniteStep):
        broken.train(tf.constant(3))
