"""The resolved plan of a trainer, and the rejections that depend on model, data and overrides."""

import dataclasses

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.hardware import strategies
from ctl.replica.step.engine import engine_of
from tests import reference_model


def make_plan(replicas=1, batch=8, *, cls=reference_model.ReferenceTrainer, **options):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), batch, cls=cls, **options
    )
    return engine_of(trainer).plan


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_plan().xla = "step"


@pytest.mark.parametrize(
    ("xla", "resolved", "reason"),
    [
        ("auto", "off", "auto: on CPUs XLA makes small networks slower"),
        ("gradients", "gradients", "as configured"),
    ],
)
def test_xla_is_resolved_with_a_reason(xla, resolved, reason):
    plan = make_plan(xla=xla)
    assert (plan.xla, plan.xla_reason, plan.choice.xla) == (resolved, reason, resolved)
    assert plan.options.xla == xla


@pytest.mark.parametrize(
    ("replicas", "options", "parts", "parts_per_replica"),
    [
        (1, {}, 1, 1),
        (2, {"gradient_accumulation_steps": 2}, 2, 2),
        (1, {"logical_shards": 4}, 4, 4),
        (2, {"logical_shards": 4}, 4, 2),
    ],
)
def test_parts_per_replica(replicas, options, parts, parts_per_replica):
    plan = make_plan(replicas, **options)
    assert (plan.parts, plan.parts_per_replica) == (parts, parts_per_replica)


@pytest.mark.parametrize(
    ("policy", "checks", "skips"),
    [("stop", True, False), ("skip", True, True), ("ignore", False, False)],
)
def test_policy_decides_whether_steps_are_checked_and_skipped(policy, checks, skips):
    plan = make_plan(on_non_finite=policy)
    assert (plan.checks_finite, plan.skips) == (checks, skips)
    servers = dataclasses.replace(plan, strategy="parameter_server")
    assert (servers.checks_finite, servers.skips) == (False, False)


@pytest.mark.parametrize(
    ("precision", "reduce", "dtype", "reduce_dtype"),
    [
        ("float64", "", tf.float64, None),
        ("bfloat16", "", tf.float32, None),
        ("float32", "bfloat16", tf.float32, tf.bfloat16),
    ],
)
def test_dtypes_of_losses_and_of_the_reduction(precision, reduce, dtype, reduce_dtype):
    plan = make_plan(precision=precision, all_reduce_dtype=reduce)
    assert (plan.dtype, plan.reduce_dtype) == (dtype, reduce_dtype)


def test_bfloat16_reduction_between_processes_on_cpus_is_rejected(monkeypatch):
    monkeypatch.setattr(strategies, "uses_cpu_collectives", lambda strategy: True)
    make_plan(2, precision="float32")
    with pytest.raises(ctl.UsageError, match=r'processes on CPUs: set runtime.all_reduce.dtype=""'):
        make_plan(2, precision="float32", all_reduce_dtype="bfloat16")


def test_plan_records_the_overrides_of_the_trainer():
    class OwnReplicaStep(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return super().replica_step(batch)

    class OwnTrainStep(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            super().train_step(iterator)

    overrides = [
        (plan.own_replica_step, plan.own_train_step)
        for plan in (make_plan(), make_plan(cls=OwnReplicaStep), make_plan(cls=OwnTrainStep))
    ]
    assert overrides == [(False, False), (True, False), (False, True)]
    # tests/replica/step/compiled_loop_test.py has the rejections of the compiled loop.
    for cls, method in ((OwnReplicaStep, "replica_step"), (OwnTrainStep, "train_step")):
        with pytest.raises(
            ctl.UsageError, match=f"checks the single loss of ctl's own step.*overrides {method}"
        ):
            make_plan(cls=cls, loss_spike=3.0)


def test_own_dataset_is_rejected_if_batches_are_read_again():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, on_non_finite="rollback")
    with pytest.raises(ctl.UsageError, match="choose stop, skip or ignore to set train_dataset"):
        trainer.train_dataset = tf.data.Dataset.from_tensors(reference_model.examples())


class Normalized(reference_model.ReferenceTrainer):
    """A model with a plain batch normalization."""

    def build_model(self):
        layers = tf_keras.layers
        norms = [layers.BatchNormalization(name="first"), layers.BatchNormalization(name="second")]
        return tf_keras.Sequential(
            [layers.InputLayer([4]), layers.Dense(5), *norms, layers.Dense(3)]
        )

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)


def test_warns_of_plain_batch_norm_if_the_batch_is_split(caplog):
    reference_model.make_trainer(testing.make_strategy(2), 8, cls=Normalized)
    (message,) = caplog.messages  # one for all layers
    assert "(first, second). Use ctl.SyncBatchNormalization" in message
    caplog.clear()
    reference_model.make_trainer(testing.make_strategy(1), 8, cls=Normalized)
    reference_model.make_trainer(
        testing.make_strategy(2), 8, cls=Normalized, model={"sync_batch_norm": True}
    )
    assert caplog.text == ""


def test_sync_batch_norm_with_accumulation_requires_per_micro_batch():
    options = {"cls": Normalized, "gradient_accumulation_steps": 2}
    with pytest.raises(ctl.UsageError, match="sync_batch_norm=per_micro_batch"):
        reference_model.make_trainer(
            testing.make_strategy(2), 8, model={"sync_batch_norm": True}, **options
        )
    reference_model.make_trainer(
        testing.make_strategy(2), 8, model={"sync_batch_norm": "per_micro_batch"}, **options
    )


def test_unknown_value_of_model_recompute_is_rejected():
    with pytest.raises(ctl.UsageError, match=r"model\.recompute is 'all', but must be 'blocks'"):
        reference_model.make_trainer(testing.make_strategy(1), 8, model={"recompute": "all"})


def test_sync_batch_norm_without_batch_norm_or_with_another_value_is_rejected():
    with pytest.raises(ctl.UsageError, match="no effect"):
        reference_model.make_trainer(testing.make_strategy(1), 8, model={"sync_batch_norm": True})
    with pytest.raises(ctl.UsageError, match="must be True, False or"):
        reference_model.make_trainer(
            testing.make_strategy(1), 8, cls=Normalized, model={"sync_batch_norm": "yes"}
        )


@pytest.mark.parametrize(
    ("batch", "rejected"), [pytest.param(8, False, marks=pytest.mark.slow), (7, True)]
)
def test_activity_regularizer_is_rejected_if_the_batch_splits_unevenly(batch, rejected):
    class Active(reference_model.ReferenceTrainer):
        def build_model(self):
            penalty = tf_keras.regularizers.L2(0.1)
            layer = tf_keras.layers.Dense(3, activity_regularizer=penalty)
            return tf_keras.Sequential([tf_keras.layers.InputLayer([4]), layer])

        def forward(self, batch, training):
            return self.model(batch["x"], training=training)

    if rejected:
        with pytest.raises(ctl.UsageError, match="activity regularizer"):
            reference_model.make_trainer(testing.make_strategy(2), batch, cls=Active)
    else:
        losses = []
        for replicas in (1, 2):
            trainer = reference_model.make_trainer(
                testing.make_strategy(replicas), batch, cls=Active
            )
            losses.append(float(trainer.train(tf.constant(5))["loss"]))
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_logical_shards_are_rejected_for_partial_global_batches():
    def make(split):
        return ctl.data.GlobalBatches(
            tf.data.Dataset.from_tensor_slices(reference_model.examples()).batch(8)
        )

    factory = {"data_factory": staticmethod(make)}
    cls = type("FromBatches", (reference_model.ReferenceTrainer,), factory)
    with pytest.raises(ctl.UsageError, match="requires full batches"):
        reference_model.make_trainer(testing.make_strategy(2), 8, cls=cls, logical_shards=4)


def test_many_batches_are_sent_to_a_gpu_at_a_time_unless_the_train_step_is_the_users(monkeypatch):
    class OwnTrainStep(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            super().train_step(iterator)

    strategy = testing.make_strategy(1)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for cls, mode in ((reference_model.ReferenceTrainer, "loop"), (OwnTrainStep, "step")):
        trainer = reference_model.make_trainer(strategy, 8, cls=cls, xla="auto")
        assert engine_of(trainer).plan.xla == mode
