"""A training step that does not fit into memory ends with one line of advice."""

import types

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from ctl.data.layout import Layout
from ctl.replica.step import memory_estimate, out_of_memory
from ctl.replica.step.memory_estimate import MemoryEstimate
from ctl.replica.step.plan import Plan
from tests import reference_model
from tests.experiments import CONFIG, TRAINER

OOM = "OOM when allocating tensor with shape[256,1024] and type float on /device:GPU:0"
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


@pytest.mark.parametrize(
    ("rows", "arguments", "line"),
    [
        (
            256, {},
            f"256 rows per replica: set optimizer.gradient_accumulation_steps=2 {DOUBLED}",
        ),
        (
            256, dict(gradient_accumulation_steps=4),
            "256 rows per replica in 4 micro-batches: set "
            f"optimizer.gradient_accumulation_steps=8 {DOUBLED}",
        ),
        (
            3, dict(gradient_accumulation_steps=2),
            "3 rows per replica in 2 micro-batches: set optimizer.gradient_accumulation_steps=3, wrap "
            "layers in ctl.recompute, or reduce the batch size.",
        ),
        (1, {}, "1 rows per replica: wrap layers in ctl.recompute, or use a smaller model."),
        (
            4, dict(gradient_accumulation_steps=4),
            f"4 rows per replica in 4 micro-batches: {RECOMPUTE} use a smaller model.",
        ),
        (256, dict(logical_shards=4), f"256 rows per replica: {RECOMPUTE} reduce the batch size."),
        (256, dict(sync_batch_norm=True), f"256 rows per replica: {RECOMPUTE} reduce the batch size."),
        (
            256, dict(sync_batch_norm=True, model={"sync_batch_norm": "per_micro_batch"}),
            f"256 rows per replica: set optimizer.gradient_accumulation_steps=2 {DOUBLED}",
        ),
        (256, dict(own_train_step=True), "256 rows per replica: reduce the batch size."),
    ],
)  # fmt: skip
def test_advice_doubles_the_micro_batches_if_the_options_allow_it(rows, arguments, line):
    assert out_of_memory.advice(make_plan(rows, **arguments)) == f"{PROBLEM} {line}"


def measurement(limit_gib, *, current_gib=1.0, micro_batches=1, slots_gib=0.0):
    """A step that needs 8 GiB of activations in one micro-batch, and 0.5 GiB of gradients."""
    gib = 2**30
    activations = 8 * gib // micro_batches
    estimate = MemoryEstimate(
        weights=gib // 2,
        slots=gib // 2,
        averages=0,
        compression=0,
        gradients=gib // 2,
        gradient_sum=gib // 2 * (micro_batches > 1),
        activations=activations,
        fixed=0,
        step=activations,
        input=0,
        prefetched=0,
        micro_batches=micro_batches,
    )
    return out_of_memory.Measurement(
        estimate,
        limit=int(limit_gib * gib),
        current=int(current_gib * gib),
        slots_to_split=int(slots_gib * gib),
    )


@pytest.mark.parametrize(
    ("rows", "measured", "options", "line"),
    [
        # 1 + 8 GiB with one micro-batch; 1 + 8/n + 2 x 0.5 GiB with n.
        (
            256, measurement(8), {},
            "256 rows per replica, which need about 9.0 GiB of 8.0 GiB on the device: set "
            "optimizer.gradient_accumulation_steps=2 (about 6.0 GiB)",
        ),
        (
            256, measurement(4), {},
            "256 rows per replica, which need about 9.0 GiB of 4.0 GiB on the device: set "
            "optimizer.gradient_accumulation_steps=8 (about 3.0 GiB)",
        ),
        # A divisor of 15, and what other models hold on the device counts.
        (
            15, measurement(8, current_gib=3.0), {},
            "15 rows per replica, which need about 11.0 GiB of 8.0 GiB on the device: set "
            "optimizer.gradient_accumulation_steps=3 (about 6.7 GiB)",
        ),
        (
            256, measurement(4, micro_batches=2), dict(gradient_accumulation_steps=2),
            "256 rows per replica in 2 micro-batches, which need about 5.5 GiB of 4.0 GiB on the "
            "device: set optimizer.gradient_accumulation_steps=8 (about 3.0 GiB)",
        ),
    ],
)  # fmt: skip
def test_advice_names_the_micro_batches_that_fit(rows, measured, options, line):
    assert out_of_memory.advice(make_plan(rows, **options), measured) == (
        f"{PROBLEM} {line}, {RECOMPUTE} reduce the batch size."
    )


def test_advice_counts_the_logical_shards_of_a_replica():
    plan = make_plan(256, replicas=2, logical_shards=4)  # two shards per replica
    line = out_of_memory.advice(plan, measurement(4, micro_batches=2))
    assert "256 rows per replica, which need about 5.5 GiB of 4.0 GiB on the device" in line


def test_advice_names_no_micro_batches_if_none_fit_or_are_allowed():
    expected = (
        f"{PROBLEM} 256 rows per replica, which need about 9.0 GiB of 2.0 GiB on the device: "
        f"{RECOMPUTE} reduce the batch size."
    )
    assert out_of_memory.advice(make_plan(256), measurement(2)) == expected
    plan = make_plan(256, sync_batch_norm=True)
    assert out_of_memory.advice(plan, measurement(8)) == expected.replace("2.0 GiB", "8.0 GiB")


@pytest.mark.parametrize(
    ("limit", "proposals"),
    [
        # 10 GiB of variables, of which 8 are slots: 4 GiB of them with two replicas. With 8 GiB of
        # activations, 18 GiB are needed: 14 with split slots, 15 with two micro-batches.
        (
            16,
            "set optimizer.gradient_accumulation_steps=4 (about 13.0 GiB), set "
            "optimizer.shard_state=true (about 14.0 GiB), ",
        ),
        (
            12,
            "set optimizer.shard_state=true and optimizer.gradient_accumulation_steps=4 (about 9.0 "
            "GiB), ",
        ),
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
        return out_of_memory._slots_to_split(trainer, measurement(8).estimate)

    assert slots(tf_keras.optimizers.Adam) == measurement(8).estimate.slots > 0
    assert slots(tf_keras.optimizers.Adam, replicas=1) == 0
    assert slots(tf_keras.optimizers.Adafactor) == 0
    assert slots(tf_keras.optimizers.Adam, shard_state=True) == 0


def test_advice_names_the_switch_of_a_model_that_reads_it():
    plan = make_plan(256, model={"recompute": ""})
    assert "(about 6.0 GiB), set model.recompute=blocks, or" in out_of_memory.advice(
        plan, measurement(8)
    )
    plan = make_plan(256, model={"recompute": "blocks"})
    assert "set model.recompute" not in out_of_memory.advice(plan, measurement(8))


def test_an_estimate_that_is_too_low_is_not_shown():
    line = out_of_memory.advice(make_plan(256), measurement(80))
    assert (
        line
        == f"{PROBLEM} 256 rows per replica: set optimizer.gradient_accumulation_steps=2 {DOUBLED}"
    )


def test_step_out_of_memory_on_a_gpu_names_what_fits(monkeypatch):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 512, cls=failing(OOM))
    estimate = memory_estimate.estimate(trainer)
    held = 2 * estimate.persistent  # by this trainer, and by something else
    limit = int((held + estimate.step_bytes(4)) / 0.9) + 1
    monkeypatch.setattr(out_of_memory.devices, "gpu_memory_limit", lambda name: limit)
    memory_info = {"current": held, "peak": limit}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: memory_info)
    with pytest.raises(ctl.UsageError, match=r"gradient_accumulation_steps=4 \(about 0\.0 GiB\)"):
        trainer.train(tf.constant(3))


@pytest.mark.parametrize(
    ("message", "memory"),
    [
        (OOM, True),
        ("Out of memory while trying to allocate 8589934592 bytes.", True),
        ("Failed to allocate request for 8.00GiB", True),
        ("Too many open files", False),
        ("No space left on device", False),
    ],
)
def test_errors_about_memory_are_recognized(message, memory):
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert out_of_memory.is_out_of_memory(error) == memory


def failing(message):
    """A trainer whose first step raises TensorFlow's error."""

    class Failing(reference_model.ReferenceTrainer):
        def train_loop_begin(self):
            raise tf.errors.ResourceExhaustedError(None, None, message)

    return Failing


class Hungry(reference_model.ReferenceTrainer):
    """Its step requests memory that does not exist."""

    def per_example_loss(self, batch, outputs):
        loss = super().per_example_loss(batch, outputs)

        def fail(value):
            raise MemoryError("no memory")

        return tf.ensure_shape(tf.py_function(fail, [loss], loss.dtype), loss.shape)


class OwnStep(Hungry):
    """Overrides train_step, which ctl cannot split into micro-batches."""

    def train_step(self, iterator):
        super().train_step(iterator)


def test_step_out_of_memory_raises_one_line():
    trainer = reference_model.make_trainer(
        testing.make_strategy(1),
        4,
        cls=Hungry,
        gradient_accumulation_steps=2,
        allow_unkeyed_random=True,
        allow_row_coupling=True,
    )
    with pytest.raises(ctl.UsageError) as raised:
        trainer.train(tf.constant(3))
    assert str(raised.value) == (
        f"{PROBLEM} 4 rows per replica in 2 micro-batches: set "
        f"optimizer.gradient_accumulation_steps=4 {DOUBLED}"
    )
    assert isinstance(raised.value.__cause__, tf.errors.ResourceExhaustedError)


@pytest.mark.slow
def test_own_train_step_is_not_advised_to_accumulate():
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 8, cls=OwnStep, allow_unkeyed_random=True
    )
    with pytest.raises(ctl.UsageError, match=r"8 rows per replica: reduce the batch size\.$"):
        trainer.train(tf.constant(3))


def test_other_exhaustion_is_raised_unchanged():
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 8, cls=failing("Too many open files")
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match="Too many open files"):
        trainer.train(tf.constant(3))


def test_program_ends_with_the_line(tmp_path, monkeypatch, capsys):
    step = "def per_example_loss(self, batch, outputs):\n"
    error = f"tf.errors.ResourceExhaustedError(None, None, {OOM!r})"
    begin = f"def train_loop_begin(self):\n        raise {error}\n\n    {step}"
    (tmp_path / "exp.py").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text("import tensorflow as tf\n" + TRAINER.replace(step, begin))
    monkeypatch.chdir(tmp_path)
    assert main.run(["ctl", "--config=exp.py"]) == 2
    assert capsys.readouterr().err == (
        f"ctl: {PROBLEM} 4 rows per replica: set optimizer.gradient_accumulation_steps=2 "
        f"{DOUBLED}\n"
    )
