"""Every quantity of a trainer is recorded, under a name that splits share."""

import numpy as np
import tensorflow as tf

from ctl.testing import make_strategy
from ctl.testing.contents import contents_of, read_value
from ctl.testing.splits import Split
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery

SPLIT = Split(4, replicas=2)


def start_run(cls):
    return TrainerSubject(cls, gallery.examples(), 2).start(SPLIT)


def test_record_has_every_quantity_of_each_step():
    run = start_run(gallery.Normalized)
    trainer = run.trainer
    weights = [v.numpy() for v in trainer.model.trainable_variables]
    record = run.record(evaluate=True)
    assert len(record.steps) == 2
    kinds = [kind for kind, _ in record.steps[0]]
    assert kinds.count("update") == len(weights)
    assert kinds.count("statistic") == 2
    assert {"loss", "metric", "state"} <= set(kinds)
    assert {name for _, name in record.evaluation} == {"accuracy", "examples", "loss"}
    assert record.mismatches == []
    steps = [[v for (k, _), v in s.items() if k == "update"] for s in record.steps]
    variables, updates = trainer.model.trainable_variables, zip(*steps, strict=True)
    for variable, start, changes in zip(variables, weights, updates, strict=True):
        np.testing.assert_allclose(start + sum(changes), variable.numpy(), rtol=1e-12)


def test_second_trainer_gets_the_names_of_the_first():
    first = start_run(gallery.Right).trainer
    names = tuple(contents_of(first).name_variables())
    with first.build_scope():
        first.model = gallery.Right.build_model(first)
    contents = contents_of(first)
    assert tuple(contents.name_variables()) != names  # Keras continues to number the layers
    assert tuple(contents.name_variables((names,))) == names


def test_local_variable_is_read_as_its_aggregation_requires():
    strategy = make_strategy(2)
    for aggregation, expected in (("SUM", 3.0), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1.0)):
        with strategy.scope():
            on_read = tf.VariableSynchronization.ON_READ
            rule = dict(synchronization=on_read, aggregation=tf.VariableAggregation[aggregation])
            variable = tf.Variable(0.0, **rule)

        def assign(variable=variable):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            variable.assign(tf.cast(replica, tf.float32) + 1.0)

        strategy.run(tf.function(assign))
        assert read_value(strategy, variable) == expected
