"""One step: the update is a function of the global batch alone."""

import numpy as np
import orbit
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.data import sampler
from ctl.testing import tiny
from tests import reference_model

# (global batch, replicas): even shares, uneven ones, an empty one, one replica.
SPLITS = [(8, 1), (8, 2), (8, 4), (5, 1), (5, 2), (7, 4), (3, 4), (130, 4)]


def batch_rows(step, batch, seed=0):
    """The examples of a step's global batch, in the order of the sampler."""
    positions = tf.range(step * batch, (step + 1) * batch, dtype=tf.int64)
    return sampler.example_indexes(
        positions, count=reference_model.EXAMPLES, seed=seed, span=batch
    ).numpy()


def check_one_step(trainer, strategy, rows, weighted=True):
    """Trains one step; every replica's copy must have moved by the gradient computed by hand."""
    before = trainer.model.get_weights()
    loss, gradients, _ = reference_model.loss_and_gradients(before, rows, weighted)
    outputs = trainer.train(tf.constant(1))
    assert float(outputs["loss"]) == pytest.approx(loss, abs=1e-12)
    for variable, old, gradient in zip(
        trainer.model.trainable_variables, before, gradients, strict=True
    ):
        for copy in testing.copies(strategy, variable):
            np.testing.assert_allclose(old - copy, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(("batch", "replicas"), SPLITS)
def test_update_is_gradient_of_global_batch(batch, replicas, accumulation):
    if accumulation > -(-batch // replicas):
        with pytest.raises(ctl.UsageError, match="gradient_accumulation_steps"):
            reference_model.make_trainer(
                testing.make_strategy(replicas), batch, gradient_accumulation_steps=accumulation
            )
        return
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, batch, gradient_accumulation_steps=accumulation)
    rows = reference_model.pick(reference_model.examples(), batch_rows(0, batch))
    check_one_step(trainer, where, rows)


class Unweighted(reference_model.ReferenceTrainer):
    weighted = False


@pytest.mark.parametrize(("batch", "replicas"), SPLITS)
def test_update_without_weights_is_the_mean_over_the_rows_that_exist(batch, replicas):
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, batch, cls=Unweighted)
    rows = reference_model.pick(reference_model.examples(), batch_rows(0, batch))
    check_one_step(trainer, where, rows, weighted=False)


def test_no_strategy_at_all_is_one_replica():
    trainer = reference_model.make_trainer(None, 5)
    rows = reference_model.pick(reference_model.examples(), batch_rows(0, 5))
    check_one_step(trainer, tf.distribute.get_strategy(), rows)


def test_second_step_takes_the_next_global_batch():
    where = testing.make_strategy(2)
    trainer = reference_model.make_trainer(where, 5)
    for step in range(6):  # past the end of the first epoch, 23 examples
        check_one_step(
            trainer, where, reference_model.pick(reference_model.examples(), batch_rows(step, 5))
        )
    assert trainer.global_step.numpy() == trainer.optimizer.iterations.numpy() == 6


class SomeWeightsZero(reference_model.ReferenceTrainer):
    def sample_weight(self, batch):
        return tf.where(batch["token"] < 3, batch["weight"], 0.0)


class AllWeightsZero(reference_model.ReferenceTrainer):
    def sample_weight(self, batch):
        return tf.zeros_like(batch["weight"])


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("cls", [SomeWeightsZero, AllWeightsZero])
def test_rows_of_weight_zero_do_not_count(cls, replicas):
    where = testing.make_strategy(replicas)
    rows = reference_model.pick(reference_model.examples(), batch_rows(0, 7))
    rows["weight"] = np.where((rows["token"] < 3) & (cls is SomeWeightsZero), rows["weight"], 0.0)
    check_one_step(reference_model.make_trainer(where, 7, cls=cls), where, rows)


def dataset_trainer(make):
    """A ReferenceTrainer class with the data that `make(split)` returns."""
    return type(
        "DatasetTrainer", (reference_model.ReferenceTrainer,), {"data_factory": staticmethod(make)}
    )


@pytest.mark.parametrize(("batch", "replicas"), [(6, 1), (6, 2), (7, 2), (7, 4), (3, 4)])
def test_dataset_of_examples_is_batched_and_split_in_its_own_order(batch, replicas):
    cls = dataset_trainer(
        lambda split: tf.data.Dataset.from_tensor_slices(reference_model.examples())
    )
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, batch, cls=cls)
    for step in range(4):
        rows = np.arange(step * batch, (step + 1) * batch) % reference_model.EXAMPLES
        check_one_step(trainer, where, reference_model.pick(reference_model.examples(), rows))


@pytest.fixture
def tfrecords(tmp_path):
    """Two TFRecord files with the examples alternating between them; returns their pattern."""
    rows = reference_model.examples()
    paths = [str(tmp_path / f"part-{i}.tfrecord") for i in range(2)]
    writers = [tf.io.TFRecordWriter(path) for path in paths]
    for i in range(reference_model.EXAMPLES):
        feature = {
            name: tf.train.Feature(
                float_list=tf.train.FloatList(value=np.atleast_1d(values[i]).astype(np.float32))
            )
            for name, values in rows.items()
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writers[i % 2].write(example.SerializeToString())
    for writer in writers:
        writer.close()
    return str(tmp_path / "part-*.tfrecord")


def parse(record):
    shapes = {"x": [reference_model.FEATURES], "token": [], "label": [], "weight": []}
    features = {name: tf.io.FixedLenFeature(shape, tf.float32) for name, shape in shapes.items()}
    parsed = tf.io.parse_single_example(record, features)
    kinds = {"x": tf.float64, "token": tf.int64, "label": tf.int64, "weight": tf.float64}
    return {name: tf.cast(value, kinds[name]) for name, value in parsed.items()}


@pytest.mark.parametrize(("batch", "replicas"), [(6, 1), (6, 2), (7, 4)])
def test_tfrecords_in_order(tfrecords, batch, replicas):
    tuning = {"shuffle_buffer": 0, "interleave": 2}

    def make(split):
        # Two files interleaved record by record give the examples back in their order.
        return ctl.data.tfrecords(tfrecords, parse, split="eval", tuning=tuning)

    rows = {
        k: v.astype(np.float32) if v.dtype == float else v
        for k, v in reference_model.examples().items()
    }
    rows = {k: v.astype(float) if v.dtype == np.float32 else v for k, v in rows.items()}
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, batch, cls=dataset_trainer(make))
    for step in range(4):
        picked = np.arange(step * batch, (step + 1) * batch) % reference_model.EXAMPLES
        check_one_step(trainer, where, reference_model.pick(rows, picked))


def test_shuffled_tfrecords_give_the_same_updates_on_any_replicas(tfrecords):
    def make(split):
        return ctl.data.tfrecords(tfrecords, parse, split=split, seed=3)

    ends = []
    for replicas in (1, 2, 4):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas), 7, cls=dataset_trainer(make)
        )
        trainer.train(tf.constant(10))
        ends.append(trainer.model.get_weights())
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_ready_global_batches_with_a_partial_last_one(replicas):
    def make(split):
        dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples()).take(7).batch(4)
        return ctl.data.GlobalBatches(dataset)

    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, 4, cls=dataset_trainer(make))
    for rows in ([0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]):  # 3 rows on 4 replicas: one has none
        check_one_step(trainer, where, reference_model.pick(reference_model.examples(), rows))


def slots(trainer):
    """Every variable of the optimizer, counters included."""
    return list(trainer.optimizer.variables)


OPTIMIZERS = {
    "adam": lambda: tf_keras.optimizers.Adam(1e-2),
    "momentum": lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9),
}


REPEATED = [
    pytest.mark.slow,
    pytest.mark.long,
]  # the same with the other optimizer or without dropout


@pytest.mark.parametrize(
    ("batch", "dropout", "name"),
    [
        (8, 0.0, "momentum"),
        (7, 0.4, "adam"),
        pytest.param(8, 0.0, "adam", marks=REPEATED),
        pytest.param(7, 0.0, "adam", marks=REPEATED),
        pytest.param(7, 0.0, "momentum", marks=REPEATED),
        pytest.param(7, 0.4, "momentum", marks=REPEATED),
    ],
)
def test_fifty_steps_are_the_same_on_1_2_and_4_replicas(name, dropout, batch):
    cls = type("DroppingTrainer", (reference_model.ReferenceTrainer,), {"dropout": dropout})
    references = None
    for replicas in (1, 2, 4):
        where = testing.make_strategy(replicas)
        trainer = reference_model.make_trainer(where, batch, cls=cls, optimizer=OPTIMIZERS[name])
        trainer.train(tf.constant(50))
        variables = [*trainer.model.variables, *slots(trainer)]
        if references is None:
            references = [variable.numpy() for variable in variables]
            assert trainer.optimizer.iterations.numpy() == 50
        for variable, reference in zip(variables, references, strict=True):
            for copy in testing.copies(where, variable):
                np.testing.assert_allclose(copy, reference, rtol=0, atol=1e-10)


def test_one_float32_step_is_the_same_on_1_2_and_4_replicas():
    ends = []
    for replicas in (1, 2, 4):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas), 7, precision="float32"
        )
        trainer.train(tf.constant(1))
        ends.append(trainer.model.get_weights())
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            assert one.dtype == np.float32
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_dropout_changes_the_update_and_its_mask_changes_with_the_step():
    cls = type("DroppingTrainer", (reference_model.ReferenceTrainer,), {"dropout": 0.4})
    ends = {}
    for seed in (0, 1):
        trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls, seed=seed)
        ends[seed] = trainer.model.get_weights()
    plain = reference_model.make_trainer(testing.make_strategy(1), 8)
    dropping = reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls)
    plain.model.set_weights(dropping.model.get_weights())
    for trainer in (plain, dropping):
        trainer.train(tf.constant(1))
    assert np.abs(plain.model.get_weights()[1] - dropping.model.get_weights()[1]).max() > 1e-3


@pytest.mark.parametrize("replicas", [1, 2])
def test_same_seed_gives_the_same_bits_and_another_seed_does_not(replicas):
    cls = type("DroppingTrainer", (reference_model.ReferenceTrainer,), {"dropout": 0.4})
    ends = []
    for seed in (5, 5, 6):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas),
            7,
            cls=cls,
            seed=seed,
            precision="float32",
            optimizer=OPTIMIZERS["adam"],
        )
        trainer.train(tf.constant(20))
        ends.append(np.concatenate([w.ravel() for w in trainer.model.get_weights()]))
    assert np.array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])


@pytest.mark.parametrize("replicas", [1, 2])
def test_orbits_own_controller_drives_trainer_and_evaluator(replicas, tmp_path, capsys):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), 7, optimizer=OPTIMIZERS["adam"]
    )
    controller = orbit.Controller(
        trainer=trainer,
        evaluator=ctl.StandardEvaluator(trainer),
        strategy=trainer.strategy,
        global_step=trainer.global_step,
        steps_per_loop=10,
        checkpoint_manager=tf.train.CheckpointManager(
            tf.train.Checkpoint(**trainer.checkpoint_items()),
            str(tmp_path),
            max_to_keep=1,
            step_counter=trainer.global_step,
            checkpoint_interval=10,
        ),
    )
    output = controller.train_and_evaluate(train_steps=30, eval_interval=10)
    assert int(output["examples"]) == reference_model.EXAMPLES
    assert trainer.global_step.numpy() == 30
    assert "ckpt-30" in tf.train.latest_checkpoint(str(tmp_path))


class Reporting(reference_model.ReferenceTrainer):
    """Trains by hand-written hooks of each size."""

    def regularization_losses(self):
        return []

    def replica_step(self, batch):
        first = self.minimize(
            batch,
            lambda rows: self.per_example_loss(rows, self.forward(rows, training=True)),
        )
        self.minimize(
            batch,
            lambda rows: tf.square(self.scale * rows["x"][:, 0]),
            variables=[self.scale],
            optimizer=self.second_optimizer,
        )
        return first


@pytest.mark.parametrize(("batch", "replicas"), [(8, 1), (8, 2), (7, 4)])
def test_replica_step_may_train_two_things_by_two_optimizers(batch, replicas):
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(where, batch, cls=Reporting)
    with where.scope():
        trainer.scale = tf.Variable(2.0, dtype=tf.float64)
        trainer.second_optimizer = tf_keras.optimizers.SGD(0.5)
    trainer.train(tf.constant(1))
    rows = reference_model.pick(reference_model.examples(), batch_rows(0, batch))
    gradient = (rows["weight"] * 2 * 2.0 * rows["x"][:, 0] ** 2).sum() / rows["weight"].sum()
    for copy in testing.copies(where, trainer.scale):
        assert copy == pytest.approx(2.0 - 0.5 * gradient, abs=1e-12)
    assert {"scale", "second_optimizer"} <= set(trainer.checkpoint_items())


def test_loss_that_is_already_reduced_is_rejected():
    class Reduced(reference_model.ReferenceTrainer):
        def per_example_loss(self, batch, outputs):
            return tf.reduce_mean(super().per_example_loss(batch, outputs))

    with pytest.raises(ctl.UsageError, match="must return \\[rows\\]"):
        reference_model.make_trainer(testing.make_strategy(1), 8, cls=Reduced).train(tf.constant(1))


def test_empty_training_data_is_one_clear_line():
    cls = dataset_trainer(
        lambda split: tf.data.Dataset.from_tensor_slices(reference_model.examples()).filter(
            lambda _: False
        )
    )
    with pytest.raises(ctl.UsageError, match="ended after step 0"):
        reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls).train(tf.constant(1))


def test_corrupt_tfrecords_are_one_clear_line(tfrecords):
    path = tfrecords.replace("*", "0")
    with open(path, "r+b") as file:
        file.seek(60)
        file.write(b"corrupt")

    def make(split):
        return ctl.data.tfrecords(tfrecords, parse, split="eval")

    trainer = reference_model.make_trainer(testing.make_strategy(1), 6, cls=dataset_trainer(make))
    with pytest.raises(ctl.UsageError, match=r"training data is corrupt \(corrupted record at"):
        trainer.train(tf.constant(1))
    with pytest.raises(ctl.UsageError, match=r"evaluation data is corrupt \(corrupted record at"):
        ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))


def test_moving_global_step_moves_the_data():
    """A rollback, or a restored checkpoint, takes up the data at its step."""
    where = testing.make_strategy(2)
    trainer = reference_model.make_trainer(where, 5)
    trainer.train(tf.constant(4))
    trainer.global_step.assign(1)
    check_one_step(
        trainer, where, reference_model.pick(reference_model.examples(), batch_rows(1, 5))
    )


class TwoModels(reference_model.ReferenceTrainer):
    """A second model with dropout of its own, trained by a second update in the same step."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            layers = tf_keras.layers
            self.second = tf_keras.Sequential(
                [layers.InputLayer([4]), layers.Dropout(0.5), layers.Dense(1)]
            )
            self.second_optimizer = tf_keras.optimizers.SGD(0.1)

    def replica_step(self, batch):
        value = super().replica_step(batch)
        for _ in range(2):  # two updates of one step draw different masks
            self.minimize(
                batch,
                lambda rows: tf.square(self.second(rows["x"], training=True)[:, 0]),
                variables=self.second.trainable_variables,
                optimizer=self.second_optimizer,
            )
        return value


class ListedModel(TwoModels):
    """The second model stands in a list."""

    @property
    def second(self):
        return self.nets[0]

    @second.setter
    def second(self, model):
        self.nets = [model]


@pytest.mark.parametrize("cls", [TwoModels, ListedModel])
def test_dropout_of_a_second_model_is_keyed_by_the_row_too(cls):
    ends = []
    for replicas in (1, 4):
        trainer = reference_model.make_trainer(testing.make_strategy(replicas), 7, cls=cls)
        trainer.train(tf.constant(5))
        ends.append(trainer.second.get_weights())
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_partial_global_batches_keep_each_rows_dropout_mask(replicas):
    def make(split):
        dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples()).take(13).batch(8)
        return ctl.data.GlobalBatches(dataset)

    cls = type("DroppingBatches", (reference_model.ReferenceTrainer,), {
        "data_factory": staticmethod(make), "dropout": 0.4,
    })  # fmt: skip
    ends = []
    for count in (1, replicas):
        trainer = reference_model.make_trainer(testing.make_strategy(count), 8, cls=cls)
        trainer.train(tf.constant(4))
        ends.append(trainer.model.get_weights())
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


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


def test_optimizer_may_be_a_function_or_an_object():
    optimizer = tf_keras.optimizers.SGD(0.5)
    assert tiny.TinyTrainer(global_batch_size=8, optimizer=optimizer).optimizer is optimizer
    made = tf_keras.optimizers.SGD(0.5)
    assert tiny.TinyTrainer(global_batch_size=8, optimizer=lambda: made).optimizer is made


def test_trainer_without_an_optimizer_is_rejected():
    with pytest.raises(ctl.UsageError, match="no optimizer: pass its constructor optimizer="):
        tiny.TinyTrainer(global_batch_size=8)
