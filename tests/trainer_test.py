"""One step: the update is a function of the global batch alone."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.testing import tiny
from tests.support import reference_model
from tests.support.faulty_trainers import batch_of


def in_order(step, batch):
    """The examples of a step's global batch, in their own order, epoch after epoch."""
    return np.arange(step * batch, (step + 1) * batch) % reference_model.EXAMPLES


def check_one_step(trainer, rows, weighted=True):
    """Trains one step; every replica's copy must have moved by the gradient computed by hand."""
    before = trainer.model.get_weights()
    loss, gradients, _ = reference_model.loss_and_gradients(before, rows, weighted)
    outputs = trainer.train(tf.constant(1))
    assert float(outputs["loss"]) == pytest.approx(loss, abs=1e-12)
    for variable, old, gradient in zip(
        trainer.model.trainable_variables, before, gradients, strict=True
    ):
        for copy in testing.copies(trainer.strategy, variable):
            np.testing.assert_allclose(old - copy, gradient, rtol=0, atol=1e-12)


def check_steps(trainer, order, examples, **arguments):
    """Checks steps past the end of the first epoch; `order(step, batch)` returns their examples."""
    for step in range(-(-reference_model.EXAMPLES // trainer.global_batch_size) + 1):
        rows = reference_model.pick(examples, order(step, trainer.global_batch_size))
        check_one_step(trainer, rows, **arguments)


class Unweighted(reference_model.ReferenceTrainer):
    weighted = False


# Without a strategy, an empty micro-batch, many rows.
@pytest.mark.parametrize(
    ("batch", "replicas", "accumulation", "weighted"),
    [
        (5, None, 2, True),
        (3, 2, 2, False),
        pytest.param(130, 4, 4, True, marks=(pytest.mark.slow, pytest.mark.long)),
    ],
)
def test_update_is_gradient_of_global_batch(batch, replicas, accumulation, weighted):
    """Weighted, or the mean over the rows that exist."""
    trainer = reference_model.make_trainer(
        replicas and testing.make_strategy(replicas),
        batch,
        cls=reference_model.ReferenceTrainer if weighted else Unweighted,
        micro_batches=accumulation,
    )
    check_steps(trainer, batch_of, reference_model.examples(), weighted=weighted)
    steps = trainer.global_step.numpy()
    assert steps == trainer.optimizer.iterations.numpy() > 1
    # A rollback, or a restored checkpoint, takes up the data at its step.
    trainer.global_step.assign(1)
    rows = reference_model.pick(reference_model.examples(), batch_of(1, batch))
    check_one_step(trainer, rows, weighted)


def test_more_micro_batches_than_rows_of_a_replica_are_rejected():
    with pytest.raises(ctl.UsageError, match="micro_batches"):
        reference_model.make_trainer(testing.make_strategy(2), 5, micro_batches=4)


def dataset_trainer(make):
    """A ReferenceTrainer class with the data that `make(split)` returns."""
    return type(
        "DatasetTrainer", (reference_model.ReferenceTrainer,), {"data_factory": staticmethod(make)}
    )


@pytest.mark.slow
def test_dataset_of_examples_is_split_in_its_own_order_and_rows_of_weight_zero_do_not_count():
    """5 rows on 4 replicas are 2 + 2 + 1 + 0; some rows of the first batch, and all of the second."""
    rows = reference_model.examples()
    rows["weight"][[0, 3, *range(5, 10)]] = 0.0
    cls = dataset_trainer(lambda split: tf.data.Dataset.from_tensor_slices(rows))
    trainer = reference_model.make_trainer(testing.make_strategy(4), 5, cls=cls)
    check_steps(trainer, in_order, rows)


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.4


class DroppingBatches(Dropping):
    """Global batches of 8 and of 5 rows: on 4 replicas, one has no rows of the second."""

    @staticmethod
    def data_factory(split):
        return ctl.data.GlobalBatches(reference_model.as_dataset(split).take(13).batch(8))


@pytest.mark.slow
def test_fifty_steps_are_the_same_as_on_one_replica():
    one, many = (
        reference_model.make_trainer(
            testing.make_strategy(n), 8, cls=DroppingBatches,
            optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        )
        for n in (1, 4)
    )  # fmt: skip
    for trainer in (one, many):
        trainer.train(tf.constant(50))
    assert one.optimizer.iterations.numpy() == 50
    # Every variable of the optimizer, counters included.
    variables, references = ([*t.model.variables, *t.optimizer.variables] for t in (many, one))
    for variable, reference in zip(variables, references, strict=True):
        for copy in testing.copies(many.strategy, variable):
            np.testing.assert_allclose(copy, reference.numpy(), rtol=0, atol=1e-10)


def test_same_seed_gives_the_same_bits_and_another_seed_does_not():
    def make(seed):
        return reference_model.make_trainer(
            testing.make_strategy(1), 7, cls=Dropping,
            seed=seed, precision="float32",
            optimizer=lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9),
        )  # fmt: skip

    def is_other():
        return not np.allclose(one.model.get_weights()[1], other.model.get_weights()[1], atol=1e-3)

    one, same, other = make(5), make(5), make(6)
    assert is_other()
    other.model.set_weights(one.model.get_weights())
    other.train(tf.constant(1))
    one.train(tf.constant(1))
    assert is_other()
    one.train(tf.constant(19))
    same.train(tf.constant(20))
    for value, expected in zip(same.model.get_weights(), one.model.get_weights(), strict=True):
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected)


def test_empty_training_data_is_one_clear_line():
    cls = dataset_trainer(
        lambda split: reference_model.as_dataset(split).filter(lambda _: split == "eval")
    )
    with pytest.raises(ctl.UsageError, match="ended after step 0"):
        reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls).train(tf.constant(1))


def test_uint8_labels_are_not_pixels():
    class Default(reference_model.ReferenceTrainer):
        preprocess = ctl.StandardTrainer.preprocess

    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=Default)
    batch = {
        "image": tf.fill([2, 3, 3], tf.constant(255, tf.uint8)),
        "token": tf.constant([7, 9], tf.uint8),
        "label": tf.constant([1, 2], tf.uint8),
    }
    found = trainer.preprocess(batch)
    assert found["image"].numpy().tolist() == np.ones([2, 3, 3]).tolist()
    assert found["token"].numpy().tolist() == [7, 9]
    assert found["label"].numpy().tolist() == [1, 2]


def test_models_and_optimizers_in_lists_and_dicts_are_saved(tmp_path):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    trainer.nets = [tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])]
    trainer.optimizers = {"second": tf_keras.optimizers.Adam()}
    path = tf.train.Checkpoint(**trainer.checkpoint_items()).write(str(tmp_path / "ckpt"))
    names = " ".join(name for name, _ in tf.train.list_variables(path))
    assert "nets/0" in names and "optimizers/second" in names
    assert "accuracy" not in names


class OwnOptimizer(tiny.TinyTrainer):
    """Halves the rate of the optimizer that it is given; without one, makes its own."""

    def build_optimizer(self, optimizer):
        if optimizer is None:
            return tf_keras.optimizers.Adam(0.25)
        result = super().build_optimizer(optimizer)
        result.learning_rate = result.learning_rate / 2
        return result


def test_build_optimizer_may_change_or_replace_the_optimizer():
    trainer = OwnOptimizer(global_batch_size=8, optimizer=lambda: tf_keras.optimizers.SGD(0.5))
    assert float(trainer.optimizer.learning_rate) == 0.25
    trainer = OwnOptimizer(global_batch_size=8)
    assert type(trainer.optimizer) is tf_keras.optimizers.Adam
    trainer.train(tf.constant(2))
    assert int(trainer.optimizer.iterations) == 2


def test_optimizer_is_a_function_or_an_object():
    made = tf_keras.optimizers.SGD(0.5)
    for optimizer in (made, lambda: made):
        assert tiny.TinyTrainer(global_batch_size=8, optimizer=optimizer).optimizer is made
    with pytest.raises(ctl.UsageError, match=r"no optimizer: .*optimizer="):
        tiny.TinyTrainer(global_batch_size=8)


class Pairs(ctl.StandardTrainer):
    """Dropout, and a loss over pairs of rows: both depend on the positions of the rows."""

    def build_model(self):
        return tf_keras.Sequential(
            [tf_keras.layers.Dense(6), tf_keras.layers.Dropout(0.3), tf_keras.layers.Dense(2)]
        )

    def build_dataset(self, split, input_context):
        rows = np.random.default_rng(0)
        return ctl.data.arrays({"x": rows.normal(size=(7, 5)), "label": rows.normal(size=(7, 2))})

    def per_example_loss(self, batch, outputs):
        pairs = tf.abs(outputs[:, None] - ctl.replica.all_gather(outputs)[None])
        return tf.reduce_mean((batch["label"] - outputs) ** 2, -1) + tf.reduce_mean(pairs, [1, 2])


def train_on_own_shares(build):
    """The user's dataset gives the first of two workers 4 rows, and the second 3."""
    trainer = Pairs(
        global_batch_size=7, strategy=build(), optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        options=ctl.TrainerOptions(precision="float64"),
    )  # fmt: skip
    examples = trainer.build_dataset("train", None)

    def make(context):
        both = context.num_input_pipelines == 1
        share = slice(None) if both else (slice(4), slice(4, None))[context.input_pipeline_id]
        rows = {k: v.numpy()[share] for k, v in examples.gather(range(7)).items()}
        dataset = tf.data.Dataset.from_tensor_slices(rows)
        return dataset.batch(len(rows["x"]), drop_remainder=True).repeat()

    data = trainer.strategy.distribute_datasets_from_function(make)
    trainer.train_dataset = data
    trainer.train(tf.constant(4))
    evaluator = ctl.StandardEvaluator(trainer)
    evaluator.eval_dataset = data
    loss = evaluator.evaluate(tf.constant(1))["loss"]
    return np.concatenate([w.numpy().ravel() for w in trainer.model.weights]), float(loss)


@pytest.mark.slow
def test_own_data_with_other_static_shapes_on_each_worker_trains_as_on_one_device():
    one = train_on_own_shares(tf.distribute.get_strategy)
    workers = ctl.testing.run_workers(
        train_on_own_shares, tf.distribute.MultiWorkerMirroredStrategy
    )
    for two in workers:
        tf.nest.map_structure(functools.partial(np.testing.assert_allclose, atol=1e-12), two, one)
