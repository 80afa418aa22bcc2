"""`ctl.Step` in loops of one's own computes the update of one device, and is restored bit for bit."""

import functools
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.hardware import strategies
from tests.support.checks import close, one_line

FEATURES = np.random.default_rng(0).normal(size=(40, 5))
LABELS = np.random.default_rng(1).normal(size=(40, 2))


@functools.cache  # a worker process must not create tensors before its strategy
def source(count=40):
    return ctl.data.arrays({"x": FEATURES[:count], "label": LABELS[:count]})


def build_model():
    return tf_keras.Sequential(
        [
            tf_keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            ctl.SyncBatchNormalization(),
            tf_keras.layers.Dropout(0.3),
            tf_keras.layers.Dense(2),
        ]
    )


def squared_error(batch, outputs):
    return tf.reduce_mean((tf.cast(batch["label"], outputs.dtype) - outputs) ** 2, axis=-1)


def build_small():
    """For tests of which the model is not the subject; it takes a third of the time to trace."""
    return tf_keras.Sequential([tf_keras.layers.Dense(3), tf_keras.layers.Dense(2)])


def make_step(replicas, batch, model=build_model, **options):
    """`replicas` may be a strategy."""
    options = {"precision": "float64", "clip": ctl.Clip(global_norm=0.5)} | options
    return ctl.Step(
        model, lambda: tf_keras.optimizers.Adam(1e-2), options.pop("loss_fn", squared_error),
        global_batch_size=batch, **options,
        strategy=testing.make_strategy(replicas) if isinstance(replicas, int) else replicas,
    )  # fmt: skip


def make_small_step(replicas, batch, **options):
    return make_step(replicas, batch, build_small, **options)


def weights(step):
    return np.concatenate([w.numpy().ravel() for w in step.model.weights])


def call_with_batch_of_ctl(step, batch):
    step(next(iter(ctl.data.distribute(source(), batch, step.strategy))))


def distribute(step, batch):
    """The user's own dataset, whose last batch is partial."""
    dataset = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).repeat(3).batch(batch)
    return step.strategy.experimental_distribute_dataset(dataset)


def run_in_function(step, dataset):
    @tf.function
    def train(iterator, steps):
        for _ in tf.range(steps):
            step(next(iterator))

    step.build(next(iter(dataset)))
    train(iter(dataset), tf.constant(len(list(dataset))))


def run_in_replicas(step, dataset):
    @tf.function
    def train(batch):
        step.strategy.run(lambda rows: step(rows).loss, args=(batch,))

    step.build(next(iter(dataset)))
    with pytest.raises(ctl.UsageError, match=r"call tf_keras.backend.set_floatx\('float64'\)"):
        train(next(iter(dataset)))
    tf_keras.backend.set_floatx("float64")
    try:
        for batch in dataset:
            train(batch)
    finally:
        tf_keras.backend.set_floatx("float32")


@functools.cache
def one_device():
    step = make_step(1, 5)
    for batch in distribute(step, 5):
        step(batch)
    return weights(step)


@pytest.mark.parametrize(
    "run", [pytest.param(run_in_function, marks=pytest.mark.slow), run_in_replicas]
)
def test_loops_of_ones_own_compute_the_update_of_one_device(run):
    step = make_step(2, 5)
    run(step, distribute(step, 5))
    np.testing.assert_allclose(weights(step), one_device(), atol=1e-12)


def test_options_of_a_step_compute_the_update_of_one_device():
    """Accumulation, averages and groups, eagerly; 9 rows on 2 replicas are 5 + 4."""

    def build_dropout():
        return tf_keras.Sequential([tf_keras.layers.Dense(4), tf_keras.layers.Dropout(0.2),
                                    tf_keras.layers.Dense(2)])  # fmt: skip

    def train(count, micro_batches):
        groups = [{"variables": "*/bias", "learning_rate_scale": 0.5}]
        step = make_step(
            count, 9, build_dropout, micro_batches=micro_batches, ema_decay=0.9,
            optimizer_groups=groups,
        )  # fmt: skip
        data = ctl.data.distribute(source(), 9, step.strategy)
        losses = [step(batch).loss.numpy() for batch in itertools.islice(data, 10)]
        with step.averaged_weights():
            averages = weights(step)
        return losses, weights(step), averages, ctl.evaluate(step, source())

    tf.nest.map_structure(
        functools.partial(np.testing.assert_allclose, atol=1e-12), train(2, 3), train(1, 1)
    )


@pytest.mark.slow
def test_step_resumes_with_the_same_bits(tmp_path):
    """By tf.train.Checkpoint and by ctl.Checkpointer, of which the newest is damaged."""

    def start():
        step = make_step(2, 6)
        step.build(next(iter(ctl.data.distribute(source(), 6, step.strategy))))
        return step, ctl.Checkpointer(tmp_path, step)

    def train(step, count):
        first = step.global_step.numpy()
        data = ctl.data.distribute(source(), 6, step.strategy, start_step=first)
        for batch in itertools.islice(data, count):
            step(batch)

    undisturbed, checkpoints = start()
    train(undisturbed, 4)
    path = tf.train.Checkpoint(**undisturbed.state()).save(tmp_path / "own")
    checkpoints.save()
    train(undisturbed, 2)
    checkpoints.save()
    for file in tmp_path.glob("ckpt-6.data*"):
        file.write_bytes(b"")
    train(undisturbed, 3)

    resumed, checkpoints = start()
    for restore in (
        lambda: tf.train.Checkpoint(**resumed.state()).restore(path).assert_consumed(),
        checkpoints.all_restore_latest,
    ):
        restore()
        assert resumed.global_step.numpy() == 4
        train(resumed, 5)
        np.testing.assert_array_equal(weights(resumed), weights(undisturbed))


class HeightAndWeight(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf_keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(tf.stack([inputs["height"], inputs["weight"]], axis=-1))


def test_feature_called_weight_of_a_tuple_is_a_feature():
    """Also in a dataset of the user's own, and with weights as the third entry."""
    features, label, sample = FEATURES[:6, :2], LABELS[:6, 0], np.arange(1.0, 7.0)
    named = {"height": features[:, 0], "weight": features[:, 1]}

    step = ctl.Step(
        HeightAndWeight, lambda: tf_keras.optimizers.SGD(0.1),
        lambda batch, outputs: (batch["label"] - outputs[:, 0]) ** 2,
        global_batch_size=6, strategy=testing.make_strategy(1), precision="float64",
    )  # fmt: skip
    for targets, weight in (((label,), np.ones(6)), ((label, sample), sample)):
        dataset = tf.data.Dataset.from_tensor_slices((named, *targets))
        gradients = -2 * (label - features.sum(axis=1))[:, np.newaxis] * features
        expected = 1 - 0.1 * weight @ gradients / weight.sum()
        for batches in (
            step.strategy.experimental_distribute_dataset(dataset.batch(6)),
            ctl.data.distribute(dataset, 6, step.strategy),
        ):
            step(next(iter(batches)))
            kernel, bias = step.model.get_weights()
            np.testing.assert_allclose(kernel[:, 0], expected, rtol=1e-12)
            step.model.set_weights([np.ones_like(kernel), np.zeros_like(bias)])  # as at the start


def build_for(count, seed=0):
    """Builds a step for the first examples."""
    step = make_small_step(1, 6)
    step.build(next(iter(ctl.data.distribute(source(count), 6, step.strategy, seed=seed))))
    return step


def test_step_does_not_resume_with_other_data_unless_that_is_allowed(tmp_path):
    step, other, other_seed = build_for(40), build_for(30), build_for(40, seed=1)
    for variable in step.model.weights:  # otherwise the weights of all steps are the same
        variable.assign_add(tf.ones_like(variable))
    path, before = ctl.Checkpointer(tmp_path, step).save(), weights(step)
    for each, change in ((other, '"examples": 30'), (other_seed, '"seed": 1')):
        message = (
            rf'{path} was saved with other data \({{"examples": 40, "seed": 0, .* -> .*{change}'
        )
        with pytest.raises(ctl.UsageError, match=message):
            ctl.Checkpointer(tmp_path, each).all_restore_latest()
    assert ctl.Checkpointer(tmp_path / "own", other).all_restore_latest() is None
    checkpoints = ctl.Checkpointer(tmp_path, other, partial=True)
    assert not np.array_equal(weights(other), before)
    assert checkpoints.all_restore_latest() == path
    np.testing.assert_array_equal(weights(other), before)
    checkpoints.save()  # records the new data alone
    assert ctl.Checkpointer(tmp_path, build_for(30)).all_restore_latest() == path
    with pytest.raises(ctl.UsageError, match=r'"examples": 30.* -> .*"examples": 40'):
        ctl.Checkpointer(tmp_path, step).all_restore_latest()


@pytest.mark.slow
def test_step_that_trains_on_two_sources_resumes_with_either(tmp_path):
    step = make_small_step(1, 6)
    for count in (40, 30):
        step(next(iter(ctl.data.distribute(source(count), 6, step.strategy))))
    path = ctl.Checkpointer(tmp_path, step).save({"mine": 1})
    for count in (40, 30):
        resumed = build_for(count)
        checkpoints = ctl.Checkpointer(tmp_path, resumed)
        assert checkpoints.all_restore_latest() == path
        assert len(resumed.descriptions) == 2
    assert checkpoints.files.notes(2)["mine"] == 1


def test_outputs_of_each_replica_are_returned_and_a_nan_of_one_skips_the_step_on_all():
    step = make_small_step(2, 5, outputs=True)
    result = step(next(iter(distribute(step, 5))))
    copies = step.strategy.experimental_local_results(result.outputs)
    assert result.applied and [part.shape for part in copies] == [(3, 2), (2, 2)]
    before = weights(step)
    rows = np.where(np.arange(5)[:, None] == 3, np.nan, FEATURES[:5])  # on the second replica alone
    dataset = tf.data.Dataset.from_tensor_slices((rows, LABELS[:5])).batch(5)
    result = step(next(iter(step.strategy.experimental_distribute_dataset(dataset))))
    assert not result.applied.numpy()
    assert step.skipped_steps.numpy() == 1
    np.testing.assert_array_equal(weights(step), before)


class Blocks(tf_keras.Model):
    """Dense layers in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = [tf_keras.layers.Dense(3), tf_keras.layers.Dense(2)]

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_layers_and_optimizer_may_change_between_two_calls():
    """The batch is the same, so the trace of the last call would be reused."""
    step = make_step(1, 4, Blocks, precision="float32")
    batch = (tf.constant(FEATURES[:4]), tf.constant(LABELS[:4]))
    first, last = step.model.blocks
    for frozen in (None, first, last):
        for layer in (first, last):
            layer.trainable = layer is not frozen
        for _ in range(2):
            before = [layer.get_weights() for layer in (first, last)]
            step(batch)
        changed = [
            any(map(np.any, map(np.subtract, old, layer.get_weights())))
            for old, layer in zip(before, (first, last), strict=True)
        ]
        assert changed == [first is not frozen, last is not frozen]
    step.optimizer = tf_keras.optimizers.SGD(0.0)
    before = step.model.get_weights()[0]
    step(batch)
    np.testing.assert_array_equal(step.model.get_weights()[0], before)
    step.model.blocks.append(tf_keras.layers.Dense(2))
    step.model(batch[0])  # creates the variables of the new layer
    with pytest.raises(ctl.UsageError, match="no slot variables"):
        step(batch)


def test_data_that_tensorflow_divides_among_workers_is_named(monkeypatch, caplog):
    spec = strategies.STRATEGIES["multi_worker_mirrored"]
    monkeypatch.setattr(strategies, "spec_of", lambda strategy: spec)
    for batch, named in (
        (next(iter(ctl.data.distribute(source(), 4))), False),
        ((FEATURES[:4], LABELS[:4]), True),
    ):
        make_small_step(1, 4).build(batch)
        assert ("depend on their number" in caplog.text) is named


NOISE, REAL = LABELS, FEATURES[:, :4]


def build_gan():
    tf_keras.utils.set_random_seed(0)
    dense = tf_keras.layers.Dense
    generator = tf_keras.Sequential([dense(6, "tanh", input_shape=[2]), dense(4)])
    critic = tf_keras.Sequential([dense(5, "tanh", input_shape=[4]), dense(1)])
    return (generator, tf_keras.optimizers.Adam(1e-2)), (critic, tf_keras.optimizers.Adam(2e-2))


def train_gan_by_hand(batches):
    """The critic, then the generator, on one device in plain TensorFlow."""
    (generator, g_optimizer), (critic, c_optimizer) = build_gan()
    for noise, real in batches:
        with tf.GradientTape() as tape:
            fake_scores, scores = critic(generator(noise)), critic(real)
            loss = tf.reduce_mean(tf.nn.softplus(fake_scores) + tf.nn.softplus(-scores))
        variables = critic.trainable_variables
        c_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(-critic(generator(noise))))
        variables = generator.trainable_variables
        g_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return [*generator.get_weights(), *critic.get_weights()]


def train_gan_by_two_steps(batches, strategy):
    with strategy.scope():
        (generator, g_optimizer), (critic, c_optimizer) = build_gan()
    options = {"global_batch_size": 5, "strategy": strategy}
    holder = tf_keras.Model()  # of several models, and never called
    holder.generator = generator
    critic_step = ctl.Step(
        critic, c_optimizer,
        lambda batch, scores: tf.nn.softplus(critic(generator(batch["noise"])))[:, 0]
        + tf.nn.softplus(-scores)[:, 0],
        forward=lambda batch, training: critic(batch["real"], training=training),
        models=[holder], **options,
    )  # fmt: skip
    generator_step = ctl.Step(
        generator, g_optimizer, lambda batch, fake: tf.nn.softplus(-critic(fake))[:, 0],
        forward=lambda batch, training: generator(batch["noise"], training=training),
        models=[critic], **options,
    )  # fmt: skip
    for batch in batches:
        critic_step(batch)
        generator_step(batch)
    return [*generator.get_weights(), *critic.get_weights()]


@pytest.mark.slow
def test_gan_of_two_steps_trains_as_a_plain_loop_on_one_device(caplog):
    """5 rows on 4 replicas are 2 + 2 + 1 + 0."""
    strategy = testing.make_strategy(4)
    tf_keras.backend.set_floatx("float64")
    try:
        data = tf.data.Dataset.from_tensor_slices({"noise": NOISE, "real": REAL}).batch(5).repeat(2)
        one = train_gan_by_hand((batch["noise"], batch["real"]) for batch in data.take(10))
        batches = strategy.experimental_distribute_dataset(data.take(10))
        both = train_gan_by_two_steps(batches, strategy)
    finally:
        tf_keras.backend.set_floatx("float32")
    close(both, one, 1e-10)
    assert "does not train" not in caplog.text  # the other step does


def test_outputs_may_hold_the_terms_of_the_loss():
    """`forward` gets the batch, so what a loop wants to see of the loss is an output."""

    def forward(batch, training):
        outputs = step.model(batch["x"], training=training)
        terms = {"error": squared_error(batch, outputs), "size": tf.reduce_sum(outputs**2, axis=-1)}
        return {**terms, "attentions": None, "scale": tf.reduce_max(outputs)}

    step = ctl.Step(
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(2)]), tf_keras.optimizers.SGD,
        lambda batch, terms: terms["error"] + 0.1 * terms["size"], forward=forward, outputs=True,
        global_batch_size=4, micro_batches=2, precision="float64",
    )  # fmt: skip
    result = step((FEATURES[:4], LABELS[:4]))
    assert result.outputs["attentions"] is None and result.outputs["scale"].shape == (2,)
    mean = np.mean(result.outputs["error"] + 0.1 * result.outputs["size"])
    assert float(result.loss) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_step(2, 4)((FEATURES[:4], LABELS[:4])),
            "not distributed over the 2 replicas",
        ),
        (lambda: make_step(1, 4, cache="memory"), "cache is an option of ctl.StandardTrainer"),
        (lambda: make_step(1, 4, micro_batchs=2), "did you mean micro_batches?"),
        (lambda: make_step(1, 4, gradient_accumulation_steps=2), "did you mean micro_batches?"),
        (lambda: make_step(1, 4, fused_attention="off"), "did you mean kernels?"),
        (lambda: make_step(1, 4, on_non_finite="stop"), "must be 'skip' or 'ignore'"),
        (lambda: make_step(1, 4).state(), "call step.build"),
        (
            lambda: ctl.Step(
                build_model, tf_keras.optimizers.SGD, squared_error, globl_batch_size=4
            ),
            "no argument 'globl_batch_size': did you mean global_batch_size",
        ),
        (lambda: make_step(1, 4, stratgy=None), "did you mean strategy"),
        (
            lambda: ctl.Step(
                tf_keras.optimizers.SGD(), build_small(), squared_error, global_batch_size=4
            ),
            "model is a SGD and optimizer is a Sequential: pass a tf_keras model, then",
        ),
        (lambda: make_step(1, "4"), "global_batch_size is '4', but must be an integer"),
        (lambda: make_step(1, 4, clip=1.0), r"clip is 1.0, but must be a ctl.Clip"),
        (lambda: make_step(1, 4, metrics=["mae"]), "metrics is a list, but must be a dict"),
        (lambda: with_loss("mse"), "loss_fn is a str, but must be a function"),
        (lambda: make_step(1, 4, loss="sum"), 'loss is \'sum\', "rows" or "mean"'),
        (
            lambda: with_loss(lambda o, b: squared_error(b, o)),
            r"^<lambda> \(.*step_test.py:\d+\) fails with .* are \(batch, outputs\), in this order",
        ),
        (lambda: with_loss(mean_loss), r"^mean_loss \(.*step_test.py:\d+\) returned shape \(\)"),
        (lambda: with_loss(lambda *_: None), r"^<lambda> \(.*step_test.py:\d+\) returned None"),
        (lambda: with_loss(mean_object), r"^mean_object \(.*\) calls .* reduction=\"none\""),
        (lambda: ctl.Checkpointer("a", build_model()), "got a Sequential, .* a ctl.Step or"),
        (lambda: ctl.data.distribute(source(), 4, start_step=-1), "start_step is -1"),
        (
            lambda: make_small_step(1, 4)({"x": FEATURES[:6]}),
            "The batch has 6 rows, but global_batch_size is 4",
        ),
        (
            lambda: call_with_batch_of_ctl(make_small_step(2, 3), 6),
            "The batch has 6 rows, but global_batch_size is 3",
        ),
        (
            lambda: ctl.data.distribute({"x": FEATURES}, 4),
            "data is a dict, but must be a ctl.data.Source, .* such as ctl.data.arrays",
        ),
    ],
)
def test_mistakes_are_one_line(make, message):
    with one_line(message):
        make()


def test_error_of_a_loss_function_in_both_orders_is_its_own():
    with pytest.raises(Exception, match="KeyError: 'labels'"):
        with_loss(lambda b, o: b["labels"] - o)


MEAN = tf_keras.losses.MeanSquaredError()


def mean_loss(batch, outputs):
    return tf.reduce_mean(squared_error(batch, outputs))


def mean_object(batch, outputs):
    return MEAN(batch["label"], outputs)


def with_loss(loss_fn):
    step = make_small_step(2, 4, loss_fn=loss_fn, precision="float32")
    step.build(next(iter(distribute(step, 4))))


def test_data_that_an_evaluation_cannot_batch_is_one_line():
    step = make_small_step(1, 4)
    step.build(next(iter(distribute(step, 4))))
    spec = {"x": tf.TensorSpec([None]), "label": tf.TensorSpec([2])}
    rows = [{"x": tf.ones([size]), "label": tf.ones([2])} for size in (5, 4)]
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    with pytest.raises(ctl.UsageError, match=r"^x has shape \[5\] in one evaluation example and"):
        ctl.evaluate(step, data)


def test_evaluation_has_the_names_of_each_call_and_metrics_of_several_values():
    step = make_small_step(1, 4)
    step.build(next(iter(distribute(step, 4))))
    metric = tf_keras.metrics.R2Score(class_aggregation=None, dtype="float64")
    one, two = (ctl.evaluate(step, source(), {name: metric}) for name in ("one", "two"))
    assert {*one} - {*two} == {"one"} and one["one"] == two["two"]
    outputs = step.model(FEATURES, training=False).numpy()
    residual = ((LABELS - outputs) ** 2).sum(0) / ((LABELS - LABELS.mean(0)) ** 2).sum(0)
    np.testing.assert_allclose(one["one"], 1 - residual)


def test_mistakes_of_an_evaluation_are_one_line():
    step = make_small_step(2, 4)
    step.build(next(iter(distribute(step, 4))))
    for data, metrics, message in (
        ({"x": FEATURES}, {}, "data is a dict, .* such as ctl.data.arrays"),
        (source(), ["mae"], "metrics is a list"),
        ([(FEATURES[:4], LABELS[:4])], {}, "not distributed over the 2 replicas"),
        (tf.data.Dataset.from_tensor_slices((FEATURES[:0],) * 2), {}, "data is an empty dataset"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            ctl.evaluate(step, data, metrics)
    with pytest.raises(ctl.UsageError, match="distributed by another strategy"):
        make_small_step(1, 4)(next(iter(distribute(step, 4))))


def test_numbers_of_the_host_in_the_loss_function_are_rejected():
    generator = np.random.default_rng(0)
    step = make_small_step(
        1, 4, loss_fn=lambda batch, outputs: squared_error(batch, outputs) * generator.uniform()
    )
    with pytest.raises(ctl.UsageError, match="draws from generator"):
        step((FEATURES[:4], LABELS[:4]))


def test_model_of_another_scope_or_precision_is_rejected():
    model = tf_keras.Sequential([tf_keras.layers.Dense(2)])
    model.build([None, 5])
    for options, message in (
        ({"strategy": testing.make_strategy(2)}, "created outside the strategy's scope"),
        ({"precision": "bfloat16"}, "compute in float32"),
    ):
        step = ctl.Step(
            model, tf_keras.optimizers.SGD(), squared_error, global_batch_size=4, **options
        )
        with pytest.raises(ctl.UsageError, match=message):
            step(next(iter(distribute(step, 4))))
    step = make_small_step(2, 4, models=[model])
    with pytest.raises(ctl.UsageError, match="created outside the strategy's scope"):
        step(next(iter(distribute(step, 4))))


def divide_by_own_rows(batch, outputs):
    losses = squared_error(batch, outputs)
    return losses / tf.cast(tf.shape(losses)[0], losses.dtype)


def test_loss_that_depends_on_the_number_of_rows_is_rejected():
    """Also with `ctl.data.distribute`, whose shares have one static shape."""
    step = make_small_step(2, 4, loss_fn=divide_by_own_rows)
    for batch in (
        next(iter(distribute(step, 4))),
        next(iter(ctl.data.distribute(source(), 4, step.strategy))),
    ):
        with pytest.raises(ctl.UsageError, match=r"divide_by_own_rows \(.*the number of rows"):
            step(batch)


def test_step_reports_what_a_trainer_reports(caplog):
    """Trainers and steps share the checks of models, averages and variables."""
    unsaved = tf.Variable(0, trainable=False)

    def count_calls(batch, outputs):
        unsaved.assign_add(1)
        return squared_error(batch, outputs)

    def make(model, **options):
        optimizer = tf_keras.optimizers.SGD(0.1)
        return ctl.Step(model, optimizer, count_calls, global_batch_size=4, **options)

    batch = {"x": FEATURES[:4].astype("f"), "label": LABELS[:4].astype("f")}
    step = make(lambda: tf_keras.Sequential([tf_keras.layers.Dense(2)]), ema_decay=0.9)
    for _ in range(2):
        step(batch)
    (line,) = [line for line in caplog.messages if "does not hold" in line]
    assert re.match(r"\S+step_test\.py:\d+ assigns a variable that the trainer or ctl\.Step", line)
    with (
        step.averaged_weights(),
        pytest.raises(ctl.UsageError, match="train and save outside of it"),
    ):
        step(batch)
    narrow = tf_keras.Sequential([tf_keras.Input([3]), tf_keras.layers.Dense(2)])
    with one_line(r"does not accept x .*, or pass forward"):
        make(narrow)(batch)


def build_for_kit(loss_fn, **options):
    def build(strategy, global_batch_size):
        return ctl.Step(
            lambda: tf_keras.Sequential([tf_keras.layers.Dense(3, kernel_regularizer="l2"),
                                         tf_keras.layers.Dense(2)]),
            tf_keras.optimizers.Adam, loss_fn, global_batch_size=global_batch_size,
            strategy=strategy, precision=tf_keras.backend.floatx(), **options,
        )  # fmt: skip

    return build


def with_static_rows(batch, outputs):
    rows = int(outputs.shape[0])
    return tf.reshape(outputs, [rows, -1])[:, 0] ** 2


def test_full_batches_have_a_static_number_of_rows_and_partial_ones_are_one_line():
    for batch in itertools.islice(ctl.data.distribute(source(), 5), 1):
        assert batch["label"].shape == (5, 2)  # as of a dict
        make_small_step(1, 5, loss_fn=with_static_rows)(batch)
    step = make_small_step(1, 6, loss_fn=with_static_rows)
    data = [tf.constant(FEATURES[:rows]) for rows in (6, 3)]
    with pytest.raises(ctl.UsageError, match=r"step_test.py:\d+ .* use tf.shape\(x\)\[0\]"):
        for rows in data:
            step({"x": rows})


def test_entries_that_are_not_those_of_rows_of_a_padded_batch_are_one_line():
    def forward(batch, training):
        return step.model(tf.tile(batch["x"], [2, 1]), training=training)

    step = make_step(
        2, 7, lambda: tf_keras.Sequential([ctl.SyncBatchNormalization()]), forward=forward,
        loss_fn=lambda batch, outputs: outputs[: tf.shape(batch["x"])[0], 0] ** 2,
        allow_row_coupling=True,
    )  # fmt: skip
    with pytest.raises(ctl.UsageError, match=r"concatenate views of the rows by ctl.replica.views"):
        step(next(iter(distribute(step, 7))))


def test_code_that_runs_in_training_only_and_takes_gradients_is_traced_as_in_a_step():
    """`step.build` must not call it as an evaluation does, nor stop its tapes."""

    def forward(batch, training):
        assert training
        return step.model(batch["x"], training=training)

    def loss_fn(batch, outputs):
        with tf.GradientTape() as tape:
            tape.watch(batch["x"])
            scores = step.model(batch["x"])
        return tf.reduce_sum(tape.gradient(scores, batch["x"]) ** 2, axis=1)

    step = make_small_step(1, 4, forward=forward, loss_fn=loss_fn)
    result = tf.function(step)({"x": tf.constant(FEATURES[:4])})  # builds outside of the function
    assert result.loss > 0


@pytest.mark.slow
def test_kit_accepts_a_step_and_names_a_planted_mistake():
    arguments = {"batches": (FEATURES, LABELS), "replicas": [1, 2], "batch_sizes": [5]}
    testing.assert_loop_equivalent(build_for_kit(squared_error), **arguments)
    groups = [{"variables": "*", "optimizer": tf_keras.optimizers.Adam}]
    build = build_for_kit(divide_by_own_rows, allow_row_coupling=True, optimizer_groups=groups)
    report = testing.check_loop_equivalence(build, **arguments)
    assert "number of its own rows" in str(report)


def train_worker(folder, batch):
    """Trains 3 steps, saves, and resumes in a new step for 3 more, on the whole or on own data."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for _ in range(2):
        step = make_step(strategy, batch)
        step.build(next(iter(ctl.data.distribute(source(), batch, strategy))))
        checkpoints = ctl.Checkpointer(folder, step)
        checkpoints.all_restore_latest()
        data = ctl.data.distribute(source(), batch, strategy, start_step=step.global_step.numpy())
        for rows in itertools.islice(data, 3):
            step(rows)
        checkpoints.save()
    return weights(step), ctl.evaluate(step, source())


@pytest.mark.slow
def test_two_processes_compute_the_update_of_one_and_resume(tmp_path):
    """7 rows on two processes are 4 + 3."""
    step = make_step(1, 7)
    for batch in itertools.islice(ctl.data.distribute(source(), 7), 6):
        step(batch)
    results = testing.run_workers(train_worker, str(tmp_path), 7)
    for values, evaluation in results:
        np.testing.assert_allclose(values, weights(step), atol=1e-10)
        assert evaluation == pytest.approx(ctl.evaluate(step, source()))


def without_zeros(batch, outputs):
    """Fails for a row of zeros, as the CTC loss does for a row without labels."""
    check = tf.debugging.assert_greater(tf.reduce_max(tf.abs(batch["label"]), axis=-1), 0.0)
    with tf.control_dependencies([check]):
        return squared_error(batch, outputs)


def test_replica_without_rows_computes_a_row_that_the_loss_accepts():
    losses = []
    for replicas in (1, 4):
        tf_keras.utils.set_random_seed(0)
        step = make_small_step(replicas, 3, loss_fn=without_zeros)
        rows = {"x": FEATURES[:6], "label": LABELS[:6].astype(np.float32)}
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(3)
        batches = step.strategy.experimental_distribute_dataset(dataset)
        losses.append([step(batch).loss.numpy() for batch in batches])
    np.testing.assert_allclose(*losses, rtol=1e-12)


@pytest.mark.parametrize("distributed", [False, True])
def test_compiled_step_stops_at_a_negative_weight(distributed):
    step = make_small_step(1, 4, xla="step")
    rows = {"x": FEATURES[:4], "label": LABELS[:4], "weight": np.array([1.0, 1.0, -2.0, 1.0])}
    data = ctl.data.arrays(rows)
    batch = next(iter(ctl.data.distribute(data, 4, step.strategy))) if distributed else rows
    batch = batch if distributed else {k: tf.constant(v) for k, v in rows.items()}
    with pytest.raises(ctl.UsageError, match=r"^sample_weight is -2 for example \d of the global"):
        step(batch)


def centred(batch, outputs):
    """Reads the context of a replica, which does not exist while the model is built."""
    context = tf.distribute.get_replica_context()
    total, count = context.all_reduce(
        "SUM", [tf.reduce_sum(outputs), tf.cast(tf.size(outputs), outputs.dtype)]
    )
    return squared_error(batch, outputs - total / count)


def test_loss_may_call_a_collective_of_tensorflow():
    weights_of = {}
    for replicas in (1, 2):
        step = make_small_step(replicas, 4, loss_fn=centred)
        data = tf.data.Dataset.from_tensor_slices((FEATURES[:4], LABELS[:4])).batch(4)
        for batch in step.strategy.experimental_distribute_dataset(data):
            step(batch)
        weights_of[replicas] = weights(step)
    for one, two in zip(*weights_of.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)
