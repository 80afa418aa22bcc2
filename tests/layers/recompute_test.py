"""Recomputation in the backward pass: the same update as without it."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import UsageError
from ctl.layers import recompute as module
from ctl.rows import row_mask
from tests.support import one_batch
from tests.support.checks import one_line
from tests.support.optimized_graph import optimized_nodes

L = tf_keras.layers
RNG = np.random.default_rng(0)
IMAGES = {
    "x": RNG.normal(size=[32, 6, 6, 3]),
    "label": RNG.integers(0, 5, size=32).astype(np.int32),
}
TOKENS = {
    "x": RNG.integers(0, 9, size=[32, 7]).astype(np.int32),
    "label": RNG.integers(0, 5, size=32).astype(np.int32),
}


class Trainer(one_batch.Trainer):
    EXAMPLES = IMAGES

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


class Images(Trainer):
    """Convolutions, both kinds of batch normalization, dropout, and a loss that a layer adds."""

    norm = ctl.SyncBatchNormalization

    def build_model(self):
        block = tf_keras.Sequential(
            [L.Conv2D(4, 3), self.norm(), L.ReLU(), L.Dropout(0.3)], name="block"
        )
        x = inputs = L.Input((6, 6, 3))
        x = ctl.recompute(block)(x)
        x = ctl.recompute(L.Dense(6, activation="gelu", kernel_regularizer="l2"))(x)
        return tf_keras.Model(inputs, L.Dense(5)(L.Dropout(0.2)(L.Flatten()(x))))


class ConvertedNorm(Images):
    """A batch normalization that `model.sync_batch_norm` converts after it was wrapped."""

    def build_model(self):
        norm = ctl.recompute(L.BatchNormalization())
        return tf_keras.Sequential([L.Input((6, 6, 3)), L.Flatten(), norm, L.Dense(5)])


class Block(L.Layer):
    """Its own weight, a training flag that is not passed on, and a nested recomputation."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[int(shape[-1])], initializer="ones")
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.3)
        self.inner = ctl.recompute(L.Dense(int(shape[-1]), activation="tanh"))
        self.dropout = L.Dropout(0.3)

    def call(self, x):
        y = self.dropout(self.attention(x, x))
        if tf.reduce_sum(y) > 1e9:  # converted by AutoGraph
            y = y * 2.0
        return self.inner(x + y * self.scale)


class Sequences(Trainer):
    """Embeddings with masks, a function that reads a tensor from outside, and draws of ctl.random."""

    EXAMPLES = TOKENS

    def build_model(self):
        tokens = L.Input((7,), dtype="int32")
        x = L.Embedding(9, 8, mask_zero=True)(tokens)
        x = ctl.recompute(Block())(x)
        return tf_keras.Model(tokens, ctl.recompute(L.LSTM(8, dropout=0.2))(x))

    def forward(self, batch, training):
        x = self.model(batch["x"], training=training)
        gate = tf.sigmoid(x[:, :5])  # depends on variables, and is not an argument

        @ctl.recompute
        def head(x):
            return ctl.random.dropout(tf.nn.tanh(x[:, :5]) * gate, 0.4)

        return head(x)


class Residual(Images):
    """A functional model of two residual blocks, a stem and a head."""

    def build_model(self):
        x = inputs = L.Input((6, 6, 3))
        x = L.Conv2D(4, 3, padding="same", name="stem")(x)
        for i in range(2):
            y = self.norm()(L.Conv2D(4, 3, padding="same")(x))
            x = L.Add(name=f"block{i}_out")([x, L.Dropout(0.3)(L.ReLU()(y))])
        model = tf_keras.Model(inputs, L.Dense(5)(L.Flatten()(x)))
        return ctl.recompute(model, blocks="block*_out")


def train(cls, replicas, *, recompute=True, batch=8, steps=2, **options):
    """The variables after each step; checks whether anything was recomputed."""
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(3)
    trainer = one_batch.make(cls, batch, replicas, **options)
    values = []
    with module.detect_use() as used, contextlib.ExitStack() as stack:
        if not recompute:
            stack.enter_context(module.disabled())
        for _ in range(steps):
            trainer.train(tf.constant(1))
            values.append({v.name: v.numpy() for v in trainer.model.variables})
        assert used() == recompute
    return values


slow = pytest.mark.slow
CASES = [
    (Residual, 1, 8, {}),
    pytest.param(Residual, 1, 8, {"xla": "gradients"}, marks=slow),
    pytest.param(ConvertedNorm, 2, 7, {"model": {"sync_batch_norm": True}}, marks=slow),
    pytest.param(Images, 2, 7, {}, marks=slow),
    pytest.param(Sequences, 1, 8, {"micro_batches": 2}, marks=slow),
]


@pytest.mark.parametrize(("cls", "replicas", "batch", "options"), CASES)
def test_update_is_the_same_as_without_recomputation(cls, replicas, batch, options):
    expected = train(cls, replicas, recompute=False, batch=batch, **options)
    actual = train(cls, replicas, batch=batch, **options)
    for step in (0, 1):
        assert actual[step].keys() == expected[step].keys()
        for name, value in expected[step].items():
            # The weights, and so the statistics of the second step, may differ by their rounding.
            tolerance = 1e-12 if "moving" not in name else 1e-15 if step else 0
            np.testing.assert_allclose(
                actual[step][name], value, rtol=0, atol=tolerance, err_msg=name
            )


# Functions in a graph, without a trainer.


def gradients(function, *variables, order=1, count=1):
    """The gradients of sum(function(x)^2), in a traced step."""

    def step(x):
        with row_mask.examples(None, first_row=0, step=0, count=4), tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                for _ in range(count):
                    x = function(x)
                loss = tf.reduce_sum(x**2)
            first = tape.gradient(loss, variables)
            if order == 1:
                return first
            total = tf.add_n([tf.reduce_sum(g**2) for g in first])
        return outer.gradient(total, variables)

    return tf.function(step)


def test_second_derivative_is_the_same():
    kernel = tf.Variable(RNG.normal(size=[3, 3]))
    x = tf.constant(RNG.normal(size=[4, 3]))
    function = lambda x: tf.tanh(x @ kernel)  # noqa: E731
    (expected,) = gradients(function, kernel, order=2)(x)
    (actual,) = gradients(ctl.recompute(function), kernel, order=2)(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_recomputing_two_attention_blocks_traces_one_more_forward_pass():
    def trace(wrap):
        blocks = [L.MultiHeadAttention(2, 4) for _ in range(2)]
        x = tf.ones([4, 3, 8])
        for block in blocks:
            block(x, x)
        first, second = (wrap(lambda x, block=block: block(x, x)) for block in blocks)
        variables = [v for block in blocks for v in block.trainable_variables]
        step = gradients(lambda x: second(first(x)), *variables)
        operations = step.get_concrete_function(x).graph.get_operations()
        return len(operations), sum(op.type == "Softmax" for op in operations)

    (plain, softmaxes), (recomputed, twice) = trace(lambda block: block), trace(ctl.recompute)
    assert (softmaxes, twice) == (2, 4) and recomputed < 2 * plain


def test_grappler_does_not_merge_the_passes():
    kernel = tf.Variable(tf.ones([3, 3]))
    x = tf.ones([4, 3])

    def count_tanh(function):
        nodes = optimized_nodes(gradients(function, kernel, count=3), x)
        return sum(node.op == "Tanh" for node in nodes.values())

    assert count_tanh(lambda x: tf.tanh(x @ kernel)) == 3
    assert count_tanh(ctl.recompute(lambda x: tf.tanh(x @ kernel))) == 6


def test_xla_does_not_merge_the_passes():
    kernel = tf.Variable(tf.ones([3, 3]))

    def step(x):
        with row_mask.examples(None, first_row=0, step=0, count=4, compiled=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(ctl.recompute(lambda x: tf.tanh(x @ kernel))(x) ** 2)
            return tape.gradient(loss, kernel)

    compiled = tf.function(step, jit_compile=True)
    text = compiled.experimental_get_compiler_ir(tf.ones([4, 3]))(stage="hlo")
    assert "opt-barrier(" in text


STATE = tf.Variable(1.0)


class Moving(L.Layer):
    """Reads a statistic that it updates."""

    def build(self, shape):
        self.statistic = self.add_weight(name="statistic", shape=[], trainable=False)

    def call(self, x):
        new = self.statistic * 0.9 + tf.reduce_mean(x)
        self.add_update(lambda: self.statistic.assign(new))
        return tf.tanh(x * new)


class Codebook(L.Layer):
    """Gathers from a codebook that it updates."""

    def build(self, shape):
        self.codes = self.add_weight(name="codes", shape=[2, 3], trainable=False)

    def call(self, x):
        chosen = tf.gather(self.codes, tf.argmax(x, axis=1) % 2)
        self.add_update(lambda: self.codes.assign(self.codes * 0.9))
        return tf.tanh(x * chosen)


def assign(x):
    STATE.assign_add(1.0)
    return tf.tanh(x)


def draw(x):
    return tf.tanh(x + tf.random.normal([4, 3]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (assign, "Function assign in ctl.recompute assigns a variable, which would happen twice"),
        (Moving(name="m"), "Layer m in ctl.recompute reads a variable that it has assigned before"),
        (Codebook(name="c"), "Layer c in ctl.recompute reads a variable that it has assigned"),
        (draw, r"Function draw in ctl.recompute draws random numbers \(RandomStandardNormal\)"),
    ],
)
def test_what_cannot_be_repeated_is_rejected(function, message):
    kernel = tf.Variable(tf.ones([3, 3]))
    again = ctl.recompute(function)
    with one_line(message):
        gradients(lambda x: again(x @ kernel), kernel)(tf.ones([4, 3]))


def residual_model():
    x = inputs = L.Input([4])
    y = L.Dense(4, name="inner")(x)
    x = L.Add(name="a_out")([x, y])
    return tf_keras.Model(inputs, L.Dense(2, name="b_out")(x))


def nested_model():
    layers = [L.Dense(4, name=f"inner{i}", input_shape=[4]) for i in range(2)]
    blocks = [tf_keras.Sequential([each], name=f"{each.name}_out") for each in layers]
    return tf_keras.Sequential([L.Input([4]), *blocks, L.Dense(2, name="head")])


@pytest.mark.parametrize("make", [residual_model, nested_model])
def test_blocks_change_no_variable_name_layer_or_output(tmp_path, make):
    tf_keras.utils.set_random_seed(1)
    expected = make()
    tf_keras.utils.set_random_seed(1)
    model = make()
    assert ctl.recompute(model, blocks="*_out") is model
    x = RNG.normal(size=[3, 4]).astype(np.float32)
    np.testing.assert_array_equal(model(x), expected(x))
    assert [v.name for v in model.variables] == [v.name for v in expected.variables]
    names = [[layer.name for layer in each.layers[1:]] for each in (model, expected)]
    assert names[0] == names[1]
    paths = [
        tf.train.Checkpoint(model=each).save(f"{tmp_path}/{i}")
        for i, each in enumerate((model, expected))
    ]
    keys = [sorted(name for name, _ in tf.train.list_variables(path)) for path in paths]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("make", "blocks", "message"),
    [
        (residual_model, "*_end", r"got blocks='\*_end', but no layer has such a name"),
        (residual_model, "inner", "do not divide model.* into consecutive blocks"),
        (lambda: L.Dense(2), "*", "requires a functional or Sequential model"),
    ],
)
def test_blocks_that_are_no_blocks_are_rejected(make, blocks, message):
    with pytest.raises(UsageError, match=message):
        ctl.recompute(make(), blocks=blocks)


def test_what_is_not_a_layer_or_a_function_is_rejected():
    with pytest.raises(UsageError, match=r"int.*layer or a function"):
        ctl.recompute(3)


def test_it_has_no_effect_outside_of_a_step():
    layer = ctl.recompute(L.Dense(2))
    assert ctl.recompute(layer) is layer
    with module.detect_use() as used:
        layer(tf.ones([4, 3]))
        tf.function(layer)(tf.ones([4, 3]))
    assert not used()
