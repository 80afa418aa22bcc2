"""A training step that does not fit into memory: one line that says what would."""

import pytest
import tensorflow as tf

import ctl
from ctl import main, testing
from ctl.configs import compatibility
from ctl.replica import out_of_memory
from tests import reference_model
from tests.experiments import CONFIG, TRAINER

OOM = "OOM when allocating tensor with shape[256,1024] and type float on /device:GPU:0"
RAN_OUT = "The step ran out of memory with"


@pytest.mark.parametrize(
    ("rows", "options", "line"),
    [
        (
            256, {},
            "256 rows a replica: set optimizer.gradient_accumulation_steps=2 (twice the present "
            "one), or a smaller batch.",
        ),
        (
            256, dict(micro_batches=4),
            "256 rows a replica in 4 micro-batches: set optimizer.gradient_accumulation_steps=8 "
            "(twice the present one), or a smaller batch.",
        ),
        (
            3, dict(micro_batches=2),
            "3 rows a replica in 2 micro-batches: set optimizer.gradient_accumulation_steps=3, or a "
            "smaller batch.",
        ),
        (1, {}, "1 rows a replica: take a smaller model."),
        (4, dict(micro_batches=4), "4 rows a replica in 4 micro-batches: take a smaller model."),
        (256, dict(shards=4), "256 rows a replica: set a smaller batch."),
        (256, dict(sync_batch_norm=True), "256 rows a replica: set a smaller batch."),
        (
            256, dict(sync_batch_norm=True, per_micro_batch=True),
            "256 rows a replica: set optimizer.gradient_accumulation_steps=2 (twice the present "
            "one), or a smaller batch.",
        ),
    ],
)  # fmt: skip
def test_advice_halves_the_rows_that_are_computed_at_once_where_that_is_allowed(
    rows, options, line
):
    assert out_of_memory.advice(rows, compatibility.Choice(**options)) == f"{RAN_OUT} {line}"


def test_advice_for_a_step_that_micro_batches_do_not_reach():
    line = out_of_memory.advice(256, compatibility.Choice(), accumulates=False)
    assert line == f"{RAN_OUT} 256 rows a replica: set a smaller batch."


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
def test_what_is_about_memory(message, memory):
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert out_of_memory.is_told_by(error) == memory


def failing(message):
    """A trainer whose first step raises TensorFlow's error."""

    class Failing(reference_model.ReferenceTrainer):
        def train_loop_begin(self):
            raise tf.errors.ResourceExhaustedError(None, None, message)

    return Failing


class Hungry(reference_model.ReferenceTrainer):
    """Its step asks for memory that is not there, while it runs."""

    def per_example_loss(self, batch, outputs):
        loss = super().per_example_loss(batch, outputs)

        def fail(value):
            raise MemoryError("no memory")

        return tf.ensure_shape(tf.py_function(fail, [loss], loss.dtype), loss.shape)


class OwnStep(Hungry):
    """Calls nothing that would split the rows."""

    def train_step(self, iterator):
        super().train_step(iterator)


@pytest.mark.parametrize("replicas", [1, 2])
def test_step_out_of_memory_is_told_in_one_line(replicas):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), 8, cls=Hungry, gradient_accumulation_steps=2
    )
    with pytest.raises(ctl.UsageError) as told:
        trainer.train(tf.constant(3))
    assert str(told.value) == (
        f"{RAN_OUT} {8 // replicas} rows a replica in 2 micro-batches: set "
        "optimizer.gradient_accumulation_steps=4 (twice the present one), or a smaller batch."
    )
    assert isinstance(told.value.__cause__, tf.errors.ResourceExhaustedError)


def test_own_step_is_not_told_to_accumulate():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=OwnStep)
    with pytest.raises(ctl.UsageError, match=r"8 rows a replica: set a smaller batch\.$"):
        trainer.train(tf.constant(3))


def test_other_exhaustion_is_passed_on():
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
        f"ctl: {RAN_OUT} 4 rows a replica: set optimizer.gradient_accumulation_steps=2 (twice the "
        "present one), or a smaller batch.\n"
    )
