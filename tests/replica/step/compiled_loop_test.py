"""Many steps as one XLA program: the same steps for all chunks and loops."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.arithmetic.waits import InputWait
from ctl.replica.step import compiled_loop
from ctl.replica.step.compiled_loop import CompiledLoop, chunk_size
from tests import reference_model


class Unweighted(reference_model.ReferenceTrainer):
    weighted = False


def make(*, cls=Unweighted, default_strategy=False, **options):
    return reference_model.make_trainer(
        None if default_strategy else testing.make_strategy(1), 7, cls=cls,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2), **options,
    )  # fmt: skip


def close(one, other, tolerance=1e-12):
    variables = zip(
        (*one.model.variables, *one.optimizer.variables),
        (*other.model.variables, *other.optimizer.variables),
        strict=True,
    )
    for a, b in variables:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=tolerance)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 steps."""
    monkeypatch.setattr(compiled_loop, "MAX_STEPS", 4)


class FromDataset(reference_model.ReferenceTrainer):
    dropout = 0.4

    @staticmethod
    def data_factory(split):
        return tf.data.Dataset.from_tensor_slices(reference_model.examples())


# The dropout masks are those of the step and row.
@pytest.mark.parametrize(
    ("cls", "placement", "options"),
    [
        (FromDataset, "stream", {}),
        pytest.param(
            reference_model.ReferenceTrainer,
            "device",
            {"default_strategy": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_loops_that_do_not_fill_chunks_compute_the_same_steps(
    small_chunks, cls, placement, options
):
    plain = make(cls=cls, **options)
    compiled = make(cls=cls, xla="loop", placement=placement, **options)
    for trainer in (plain, compiled):
        for steps in (1, 5, 3, 1, 10):
            trainer.train(tf.constant(steps))
        assert trainer.global_step.numpy() == 20
    close(plain, compiled)
    for trainer in (plain, compiled):
        trainer.train(tf.constant(3))
        trainer.global_step.assign(1)  # discards the rest of a chunk
        trainer.train(tf.constant(5))
    close(plain, compiled)


def test_dataset_is_not_placed_on_the_device():
    with pytest.raises(ctl.UsageError, match="requires arrays"):
        make(cls=FromDataset, xla="loop", placement="device")


def test_unsupported_steps_strategies_and_data_are_rejected():
    class OwnStep(Unweighted):
        def train_step(self, iterator):
            super().train_step(iterator)

    with pytest.raises(ctl.UsageError, match="does not call your train_step"):
        make(cls=OwnStep, xla="loop")
    with pytest.raises(ctl.UsageError, match="replicas cannot share"):
        reference_model.make_trainer(testing.make_strategy(2), 8, xla="loop")
    with pytest.raises(ctl.UsageError, match="requires xla=loop"):
        make(placement="device")
    ready = staticmethod(
        lambda split: ctl.data.GlobalBatches(
            tf.data.Dataset.from_tensor_slices(reference_model.examples()).batch(7)
        )
    )
    with pytest.raises(ctl.UsageError, match="requires a Source or a Dataset of single examples"):
        make(cls=type("Ready", (Unweighted,), {"data_factory": ready}), xla="loop")


def test_setting_train_dataset_is_rejected_with_the_compiled_loop():
    trainer = make(xla="loop")
    with pytest.raises(ctl.UsageError, match=r"choose runtime\.xla=step to set train_dataset"):
        trainer.train_dataset = tf.data.Dataset.from_tensor_slices(
            reference_model.examples()
        ).batch(7)


@pytest.mark.parametrize("xla", ["loop", pytest.param("step", marks=pytest.mark.slow)])
def test_strings_are_rejected_before_anything_is_compiled(xla):
    class Named(Unweighted):
        data_factory = staticmethod(
            lambda split: ctl.data.arrays(
                {**reference_model.examples(), "name": ["a"] * reference_model.EXAMPLES}
            )
        )

    with pytest.raises(ctl.UsageError, match="XLA does not support strings"):
        make(cls=Named, xla=xla)
    make(cls=Named).train(tf.constant(2))


def test_one_program_runs_loops_of_every_length():
    traces = []

    def step(batch):
        traces.append(batch)

    loop = CompiledLoop(
        step,
        strategy=testing.make_strategy(1),
        size=4,
        input_wait=InputWait(testing.make_strategy(1)),
    )
    chunks = tf.data.Dataset.range(40).batch(4)
    for steps in (1, 2, 7):
        loop(iter(chunks), tf.constant(steps))
    assert len(traces) == 1


def test_chunk_size_is_limited_by_bytes_and_by_steps():
    image = {"image": tf.TensorSpec([None, 28, 28], tf.uint8)}
    assert chunk_size(image, rows=128) == compiled_loop.MAX_STEPS
    large = {"image": tf.TensorSpec([None, 224, 224, 3], tf.float32)}
    assert chunk_size(large, rows=128) == 256 * 2**20 // (224 * 224 * 3 * 4 * 128)
    assert chunk_size(large, rows=10_000) == 1


class Unfreezing(reference_model.ReferenceTrainer):
    """The embedding is trained from step 2 on."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(reference_model.examples(8)))

    def train_loop_begin(self):
        super().train_loop_begin()
        embedding = next(layer for layer in self.model.layers if "embedding" in layer.name)
        embedding.trainable = int(self.global_step.numpy()) >= 2


def train_by_hand(weights, steps):
    """The weights after steps of SGD with rate 1, in which each batch is all examples."""
    for step in range(steps):
        _, gradients, _ = reference_model.loss_and_gradients(weights, reference_model.examples(8))
        gradients[0] *= step >= 2
        weights = [weight - gradient for weight, gradient in zip(weights, gradients, strict=True)]
    return weights


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        pytest.param(2, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        (1, {"xla": "loop"}),
    ],
    ids=["two, accumulated", "one program"],
)
def test_layer_that_is_unfrozen_between_two_loops_is_trained_from_then_on(replicas, options):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), 8, cls=Unfreezing, **options
    )
    before = trainer.model.get_weights()
    for steps in (1, 1, 1, 2):
        trainer.train(tf.constant(steps))
    close_to(train_by_hand(before, 5), trainer)


def close_to(expected, trainer):
    for weight, value in zip(trainer.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, value, rtol=0, atol=1e-11)


def test_step_is_traced_again_only_when_a_layer_was_frozen_or_unfrozen(monkeypatch, tmp_path):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=Unfreezing)
    before = trainer.model.get_weights()
    traces = []
    monkeypatch.setattr(
        trainer, "per_example_loss",
        lambda *args, f=trainer.per_example_loss: (traces.append(0), f(*args))[1],
    )  # fmt: skip
    counts = []
    for step in range(5):
        trainer.train(tf.constant(1))
        counts.append(len(traces))
        if step == 0:
            path = tf.train.Checkpoint(**trainer.checkpoint_items()).save(str(tmp_path / "ckpt"))
    assert counts == [1, 1, 2, 2, 2]
    close_to(train_by_hand(before, 5), trainer)
    # Freezing gives the same bits after a restart.
    resumed = reference_model.make_trainer(testing.make_strategy(1), 8, cls=Unfreezing)
    tf.train.Checkpoint(**resumed.checkpoint_items()).restore(path).assert_consumed()
    for _ in range(4):
        resumed.train(tf.constant(1))
    close(resumed, trainer, 0.0)


def test_layer_without_slot_variables_cannot_be_unfrozen():
    class BuiltFrozen(Unfreezing):
        def build_model(self):
            model = super().build_model()
            next(layer for layer in model.layers if "embedding" in layer.name).trainable = False
            return model

    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=BuiltFrozen)
    trainer.train(tf.constant(2))
    with pytest.raises(
        ctl.UsageError, match="became trainable after the trainer was built"
    ) as error:
        trainer.train(tf.constant(1))
    assert "embeddings:0" in str(error.value)
    assert "\n" not in str(error.value)
