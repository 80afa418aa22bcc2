"""A training step that does not fit into memory ends with one line of advice."""

import errno
import functools
import os
import types

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built import memory_estimate, out_of_memory
from ctl.built.memory_estimate import MemoryEstimate
from ctl.data.layout import Layout
from ctl.update.plan import Plan
from tests.support import reference_model

exhausted = functools.partial(tf.errors.ResourceExhaustedError, None, None)
OOM = "OOM when allocating tensor with shape[256,1024] and type float on /device:GPU:0"
ONEDNN = "Operation received an exception:Status: 5, message: could not execute a primitive"
PROBLEM = "The step ran out of memory with"


def make_plan(rows, *, replicas=1, sync_batch_norm=False, own_train_step=False, **options):
    return Plan(
        options=ctl.TrainerOptions(**options),
        layout=Layout(rows * replicas, replicas),
        strategy="mirrored",
        full_batches=True,
        xla="off",
        xla_reason="",
        sync_batch_norm=sync_batch_norm,
        string_features=False,
        own_replica_step=False,
        own_train_step=own_train_step,
    )


RECOMPUTE = "wrap layers in ctl.recompute, or"
DOUBLED = "(twice the present number), wrap layers in ctl.recompute, or reduce the batch size."
STEPS, SHARD = "optimizer.micro_batches", "optimizer.shard_state=true"
REDUCE = f"{RECOMPUTE} reduce the batch size."


@pytest.mark.parametrize(
    ("rows", "micro_batches", "options", "line"),
    [
        (256, 1, {}, f": set {STEPS}=2 {DOUBLED}"),
        (3, 2, {}, f": set {STEPS}=3, {REDUCE}"),
        (4, 4, {}, f": {RECOMPUTE} use a smaller model."),
        (256, 1, dict(logical_shards=4), f": {REDUCE}"),
        (256, 1, dict(own_train_step=True), ": reduce the batch size."),
    ],
)
def test_advice_doubles_the_micro_batches_if_the_options_allow_it(
    rows, micro_batches, options, line
):
    plan = make_plan(rows, micro_batches=micro_batches, **options)
    parts = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
    assert out_of_memory.advice(plan) == f"{PROBLEM} {rows} rows per replica{parts}{line}"


def measurement(limit_gib, *, current_gib=1.0, micro_batches=1, slots_gib=0.0):
    """A step that needs 8 GiB of activations in one micro-batch, and 0.5 GiB of gradients."""
    gib = 2**30
    activations = 8 * gib // micro_batches
    estimate = MemoryEstimate(
        **dict.fromkeys(("weights", "slots", "gradients"), gib // 2),
        **dict.fromkeys(("fixed", "input", "prefetched"), 0),
        parts={},
        **dict.fromkeys(("activations", "step"), activations),
        gradient_sum=gib // 2 * (micro_batches > 1), micro_batches=micro_batches,
    )  # fmt: skip
    limit, current, slots = (int(each * gib) for each in (limit_gib, current_gib, slots_gib))
    return out_of_memory.Measurement(
        estimate, limit, current, {"shard_state": slots // 2} if slots else {}
    )


@pytest.mark.parametrize(
    ("rows", "options", "measured", "needed", "proposal"),
    [
        # 1 + 8 GiB with one micro-batch; 1 + 8/n + 2 x 0.5 GiB with n.
        (256, {}, measurement(8), "9.0 GiB of 8.0 GiB", f"set {STEPS}=2 (about 6.0 GiB), "),
        (256, {}, measurement(4), "9.0 GiB of 4.0 GiB", f"set {STEPS}=8 (about 3.0 GiB), "),
        # A divisor of 15, and what other models hold on the device counts.
        (
            15, {}, measurement(8, current_gib=3.0), "11.0 GiB of 8.0 GiB",
            f"set {STEPS}=3 (about 6.7 GiB), ",
        ),
        (
            256, dict(micro_batches=2), measurement(4, micro_batches=2), "5.5 GiB of 4.0 GiB",
            f"set {STEPS}=8 (about 3.0 GiB), ",
        ),
        # None fit, or they are not allowed.
        (256, {}, measurement(2), "9.0 GiB of 2.0 GiB", ""),
        (256, dict(sync_batch_norm=True), measurement(8), "9.0 GiB of 8.0 GiB", ""),
        # Two shards per replica.
        (
            256, dict(replicas=2, logical_shards=4), measurement(4, micro_batches=2),
            "5.5 GiB of 4.0 GiB", "",
        ),
    ],
)  # fmt: skip
def test_advice_names_the_micro_batches_that_fit(rows, options, measured, needed, proposal):
    parts = " in 2 micro-batches" if "micro_batches" in options else ""
    assert out_of_memory.advice(make_plan(rows, **options), measured) == (
        f"{PROBLEM} {rows} rows per replica{parts}, which need about {needed} on the device: "
        f"{proposal}{REDUCE}"
    )


@pytest.mark.parametrize(
    ("limit", "proposals"),
    [
        # 10 GiB of variables, of which 8 are slots: 4 GiB of them with two replicas. With 8 GiB of
        # activations, 18 GiB are needed: 14 with split slots, 15 with two micro-batches.
        (16, f"set {STEPS}=4 (about 13.0 GiB), set {SHARD} (about 14.0 GiB), "),
        (12, f"set {SHARD} and {STEPS}=4 (about 9.0 GiB), "),
        (6, ""),
    ],
)
def test_advice_names_split_slots_if_they_help(limit, proposals):
    measured = measurement(limit, current_gib=10.0, slots_gib=8.0)
    line = out_of_memory.advice(make_plan(256, replicas=2), measured)
    assert line.split("on the device: ")[1] == f"{proposals}{RECOMPUTE} reduce the batch size."


def test_slots_are_split_only_of_optimizers_that_support_it():
    def slots(optimizer, replicas=2, **options):
        trainer = types.SimpleNamespace(
            optimizer=optimizer(),
            options=ctl.TrainerOptions(**options),
            strategy=testing.make_strategy(replicas),
        )
        return out_of_memory._savings(trainer, measurement(8).estimate)

    half = measurement(8).estimate.slots // 2
    assert half and slots(tf_keras.optimizers.Adam) == {"shard_state": half}
    assert not slots(tf_keras.optimizers.Adam, replicas=1)
    assert not slots(tf_keras.optimizers.Adafactor)
    assert not slots(tf_keras.optimizers.Adam, shard_state=True)


def test_advice_names_the_switch_of_a_model_that_reads_it():
    off, on = (
        out_of_memory.advice(make_plan(256, model={"recompute": value}), measurement(8))
        for value in ("", "blocks")
    )
    assert "(about 6.0 GiB), set model.recompute=blocks, or" in off
    assert "set model.recompute" not in on


def test_an_estimate_that_is_too_low_is_not_shown():
    line = out_of_memory.advice(make_plan(256), measurement(80))
    assert line == f"{PROBLEM} 256 rows per replica: set {STEPS}=2 {DOUBLED}"


class Failing(reference_model.ReferenceTrainer):
    """Its first step raises TensorFlow's error."""

    message = OOM

    def train_loop_begin(self):
        raise tf.errors.ResourceExhaustedError(None, None, self.message)


def test_step_out_of_memory_on_a_gpu_names_what_fits(monkeypatch):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 512, cls=Failing)
    estimate = memory_estimate.estimate(trainer)
    held = 2 * estimate.persistent  # by this trainer, and by something else
    limit = int((held + estimate.step_bytes(4)) / 0.9) + 1
    monkeypatch.setattr(out_of_memory.device_memory, "gpu_memory_limit", lambda name: limit)
    memory_info = {"current": held, "peak": limit}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: memory_info)
    with pytest.raises(ctl.UsageError, match=r"micro_batches=4 \(about 0\.0 GiB\)"):
        trainer.train(tf.constant(3))
    trainer.message = "Too many open files"
    with pytest.raises(tf.errors.ResourceExhaustedError, match="Too many open files"):
        trainer.train(tf.constant(3))


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (exhausted(OOM), True),
        (exhausted("Out of memory while trying to allocate 8589934592 bytes."), True),
        (exhausted("Failed to allocate request for 8.00GiB"), True),
        (exhausted("Too many open files"), False),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (tf.errors.InternalError(None, None, "CUDNN_STATUS_ALLOC_FAILED"), True),
        (tf.errors.AbortedError(None, None, ONEDNN), True),
        (tf.errors.InternalError(None, None, "an illegal memory access"), False),
    ],
)
def test_errors_about_memory_are_recognized_also_as_the_cause_of_another(error, memory):
    assert out_of_memory.is_out_of_memory(error) == memory
    try:
        raise ctl.UsageError("The step failed.") from error
    except ctl.UsageError as caught:
        assert out_of_memory.is_out_of_memory(caught) == memory
