"""A training step that does not fit into memory ends with one line of advice."""

import pytest
import tensorflow as tf

import ctl
from ctl import main, testing
from ctl.data.layout import Layout
from ctl.replica import out_of_memory
from ctl.replica.plan import Plan
from tests import reference_model
from tests.experiments import CONFIG, TRAINER

OOM = "OOM when allocating tensor with shape[256,1024] and type float on /device:GPU:0"
PROBLEM = "The step ran out of memory with"


def make_plan(rows, *, sync_batch_norm=False, own_train_step=False, **options):
    return Plan(
        options=ctl.TrainerOptions(**options),
        layout=Layout(rows, 1),
        strategy="one_device",
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_step_out_of_memory_raises_one_line(replicas):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas),
        8,
        cls=Hungry,
        gradient_accumulation_steps=2,
        allow_unkeyed_random=True,
        allow_row_coupling=True,
    )
    with pytest.raises(ctl.UsageError) as raised:
        trainer.train(tf.constant(3))
    assert str(raised.value) == (
        f"{PROBLEM} {8 // replicas} rows per replica in 2 micro-batches: set "
        f"optimizer.gradient_accumulation_steps=4 {DOUBLED}"
    )
    assert isinstance(raised.value.__cause__, tf.errors.ResourceExhaustedError)


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
