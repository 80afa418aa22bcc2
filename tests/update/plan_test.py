"""The resolved plan of a trainer, and the rejections that depend on model, data and overrides."""

import dataclasses
import functools

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.data.layout import Layout
from ctl.hardware import strategies
from ctl.testing import tiny
from tests.support import reference_model


class OwnTrainStep(reference_model.ReferenceTrainer):
    def train_step(self, iterator):
        super().train_step(iterator)


def make_plan(
    replicas=1, batch=8, *, cls=reference_model.ReferenceTrainer, strategy=None, **options
):
    strategy = strategy or testing.make_strategy(replicas)
    return loop_of(reference_model.make_trainer(strategy, batch, cls=cls, **options)).plan


# The options of a plan on one replica, or on two, and what follows from them.
RESOLVED = [
    (1, {}, {
        "xla": "off",
        "xla_reason": "auto: on CPUs it depends on the model, see --mode=profile_input",
        "micro_batches": 1,
    }),
    (1, {"xla": "gradients"}, {"xla": "gradients", "xla_reason": "as configured"}),
    (2, {"micro_batches": 2}, {"micro_batches": 2}),
    (1, {"logical_shards": 4}, {"micro_batches": 4}),
    (2, {"logical_shards": 4}, {"micro_batches": 2}),
    (1, {"on_non_finite": "stop"}, {"checks_finite": True, "skips": False}),
    (1, {"on_non_finite": "skip"}, {"checks_finite": True, "skips": True}),
    (1, {"on_non_finite": "ignore"}, {"checks_finite": False, "skips": False}),
    (1, {"precision": "float64"}, {"dtype": tf.float64, "reduce_dtype": None}),
    (1, {"precision": "bfloat16"}, {"dtype": tf.float32, "reduce_dtype": None}),
    (1, {"precision": "float32", "all_reduce_dtype": "bfloat16"}, {"reduce_dtype": tf.bfloat16}),
]  # fmt: skip


@functools.cache
def plain_plan():
    return make_plan()


@pytest.mark.parametrize(("replicas", "options", "resolved"), RESOLVED)
def test_options_are_resolved(replicas, options, resolved):
    plan = dataclasses.replace(
        plain_plan(),
        layout=Layout(8, replicas),
        options=dataclasses.replace(plain_plan().options, **options),
    )
    if "xla" in options:
        plan = make_plan(**options)
    assert {name: getattr(plan, name) for name in resolved} == resolved
    assert plan.values["runtime.xla"] == plan.xla
    servers = dataclasses.replace(plan, strategy="parameter_server")
    assert (servers.checks_finite, servers.skips) == (False, False)


def test_bfloat16_reduction_between_processes_on_cpus_is_rejected(monkeypatch):
    monkeypatch.setattr(strategies, "uses_cpu_collectives", lambda strategy: True)
    make_plan(2, precision="float32")
    with pytest.raises(ctl.UsageError, match=r'runtime.all_reduce.dtype=""'):
        make_plan(2, precision="float32", all_reduce_dtype="bfloat16")


def test_plan_records_the_overrides_of_the_trainer():
    class OwnReplicaStep(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return super().replica_step(batch)

    overrides = [
        (plan.own_replica_step, plan.own_train_step)
        for plan in (make_plan(), make_plan(cls=OwnReplicaStep), make_plan(cls=OwnTrainStep))
    ]
    assert overrides == [(False, False), (True, False), (False, True)]
    # tests/compile/compiled_loop_test.py has the rejections of the compiled loop.
    for cls, method in ((OwnReplicaStep, "replica_step"), (OwnTrainStep, "train_step")):
        message = f"checks the single loss of ctl's own step.*overrides {method}"
        with pytest.raises(ctl.UsageError, match=message):
            make_plan(cls=cls, loss_spike=3.0)


def test_own_dataset_is_rejected_if_batches_are_read_again():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, on_non_finite="rollback")
    with pytest.raises(ctl.UsageError, match=r"stop, skip or ignore .*train_dataset"):
        trainer.train_dataset = tf.data.Dataset.from_tensors(reference_model.examples())


class Normalized(tiny.TinyTrainer):
    """A model with two plain batch normalizations, one of them in a model of its own."""

    def build_model(self):
        norm, dense = tf_keras.layers.BatchNormalization, tf_keras.layers.Dense
        inner = tf_keras.Sequential([norm(name="second")])
        return tf_keras.Sequential([dense(5, input_shape=[4]), norm(name="first"), inner, dense(3)])


@pytest.mark.parametrize(
    ("cls", "model", "message"),
    [
        (Normalized, {"recompute": "all"}, r"model\.recompute is 'all', but must be 'blocks'"),
        (Normalized, {"sync_batch_norm": "yes"}, "must be True, False or"),
        (reference_model.ReferenceTrainer, {"sync_batch_norm": True}, "no effect"),
    ],
)
def test_unknown_values_and_keys_without_effect_are_rejected(cls, model, message):
    with pytest.raises(ctl.UsageError, match=message):
        make_plan(cls=cls, model=model)


def test_activity_regularizer_is_rejected_if_the_batch_splits_unevenly():
    class Active(tiny.TinyTrainer):
        def build_model(self):
            penalty = {"activity_regularizer": tf_keras.regularizers.L2(0.1)}
            return tf_keras.Sequential([tf_keras.layers.Dense(3, input_shape=[4], **penalty)])

    make_plan(2, 8, cls=Active)
    with pytest.raises(ctl.UsageError, match="activity regularizer"):
        make_plan(2, 7, cls=Active)


def test_logical_shards_are_rejected_for_partial_global_batches():
    factory = {"data_factory": staticmethod(reference_model.as_global_batches)}
    cls = type("FromBatches", (reference_model.ReferenceTrainer,), factory)
    with pytest.raises(ctl.UsageError, match="requires full batches"):
        make_plan(2, cls=cls, logical_shards=4)


def test_many_batches_are_sent_to_a_gpu_at_a_time_unless_the_train_step_is_the_users(monkeypatch):
    strategy = testing.make_strategy(1)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for cls, mode in ((reference_model.ReferenceTrainer, "loop"), (OwnTrainStep, "step")):
        assert make_plan(cls=cls, strategy=strategy, xla="auto").xla == mode
