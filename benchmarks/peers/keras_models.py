"""The models in tf_keras and in Keras 3, for the programs of ctl, TensorFlow, tf_keras and Keras 3."""

import types


def build(keras, task, make=None):
    """Builds the model of a task with a Keras module, and sets its initial weights."""
    model = (make or MODELS[task.name])(keras, task)
    variables = by_name(model)
    if variables.keys() != task.weights.keys():
        raise ValueError(f"{sorted(variables.keys() ^ task.weights.keys())} differ.")
    for name, value in task.weights.items():
        variables[name].assign(value)
    return model


def by_name(model) -> dict:
    """Returns the variables by names such as "conv1/kernel", in tf_keras and in Keras 3."""
    names = (getattr(v, "path", v.name).removesuffix(":0") for v in model.trainable_variables)
    prefix = f"{model.name}/"  # of a Sequential of Keras 3
    return {
        n.removeprefix(prefix): v for n, v in zip(names, model.trainable_variables, strict=True)
    }


def operations(keras):
    """Returns the functions of arrays: those of Keras 3, or of TensorFlow by the same names."""
    if hasattr(keras, "ops"):
        return keras.ops
    import tensorflow as tf

    return types.SimpleNamespace(
        cast=tf.cast,
        concatenate=tf.concat,
        logsumexp=tf.reduce_logsumexp,
        matmul=tf.matmul,
        sum=tf.reduce_sum,
        tensordot=tf.tensordot,
        transpose=tf.transpose,
    )


def loss_fn(keras, task):
    """Returns a function (labels, outputs) -> losses."""
    if task.name == "two_tower":
        return lambda labels, outputs: outputs
    loss = keras.losses.sparse_categorical_crossentropy
    return lambda labels, outputs: loss(labels, outputs, from_logits=True)


def metrics(keras, task) -> list:
    """Returns the metrics besides the mean loss."""
    if task.name not in ("mnist", "resnet18"):
        return []
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def optimizer(keras, task):
    optimizers = keras.optimizers
    if task.name == "mnist":
        return optimizers.Adam(1e-3)
    if task.name == "resnet18":
        return optimizers.SGD(0.05, momentum=0.9)
    if task.name == "two_tower":
        return optimizers.Adagrad(0.2, initial_accumulator_value=1e-6, epsilon=1e-10)
    adamw = optimizers.AdamW(1e-3, weight_decay=0.1, beta_2=0.99, global_clipnorm=1.0)
    adamw.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return adamw


def mnist(keras, task):
    layers = keras.layers
    stack = [layers.Input((28, 28)), layers.Reshape((28, 28, 1))]
    for name, filters in (("conv1", 32), ("conv2", 64)):
        convolution = layers.Conv2D(filters, 3, activation="relu", name=name)
        stack += [convolution, layers.MaxPooling2D()]
    stack += [layers.Flatten(), layers.Dense(128, activation="relu", name="dense1")]
    return keras.Sequential([*stack, layers.Dropout(task.dropout), layers.Dense(10, name="dense2")])


def char_lm(keras, task):
    layers, math = keras.layers, operations(keras)

    class Positions(layers.Layer):
        def build(self, shape):
            self.embeddings = self.add_weight(name="embeddings", shape=shape[1:])

        def call(self, x):
            return x + self.embeddings

    class Logits(layers.Layer):
        """Uses the embeddings of the bytes (Press and Wolf 2017)."""

        def __init__(self, tokens):
            super().__init__()
            self.tokens = tokens

        def call(self, x):
            return math.tensordot(x, self.tokens.embeddings, axes=[[2], [1]])

    tokens = layers.Embedding(256, 128, name="tokens")
    inputs = keras.Input([64], dtype="int32")
    x = Positions(name="positions")(tokens(inputs))
    for i in range(4):
        y = layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_norm1")(x)
        attention = layers.MultiHeadAttention(4, 32, name=f"block{i}_attention")
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_norm2")(x)
        y = layers.Dense(512, activation="gelu", name=f"block{i}_wide")(y)
        x = layers.Add()([x, layers.Dense(128, name=f"block{i}_narrow")(y)])
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, Logits(tokens)(x))


def resnet18(keras, task):
    layers = keras.layers

    def convolve(x, filters, size, stride, name, relu=True):
        # PyTorch pads both sides alike, and so does this layer.
        x = layers.ZeroPadding2D(size // 2)(x) if size > 1 else x
        x = layers.Conv2D(filters, size, stride, use_bias=False, name=f"{name}_conv")(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
        return layers.ReLU()(x) if relu else x

    inputs = keras.Input([32, 32, 3])
    x = convolve(inputs, 64, 3, 1, "stem")
    for i, (filters, stride) in enumerate(RESNET18):
        y = convolve(x, filters, 3, stride, f"block{i}_first")
        y = convolve(y, filters, 3, 1, f"block{i}_second", relu=False)
        if stride > 1:
            x = convolve(x, filters, 1, stride, f"block{i}_shortcut", relu=False)
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, name="output")(x))


RESNET18 = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]


def towers(keras, task):
    """Returns a model from user and item ids to the vectors of both."""
    layers = keras.layers
    user = keras.Input([], dtype="int32", name="user")
    item = keras.Input([], dtype="int32", name="item")
    users = layers.Embedding(1_000_000, 16, name="users")(user)
    items = layers.Embedding(1_000_000, 16, name="items")(item)
    return keras.Model({"user": user, "item": item}, [users, items])


def pair_losses(math, user, item, ids, all_items, all_ids):
    """Returns the losses of the pairs [rows]; the negatives of a row are the items of all rows."""
    scores = math.matmul(user, math.transpose(all_items))
    same = math.cast(ids[:, None] == all_ids[None, :], scores.dtype)
    positive = math.sum(user * item, axis=1, keepdims=True)
    every = math.concatenate([positive, scores - 1e9 * same], 1)
    return math.logsumexp(every, 1) - positive[:, 0]


def two_tower(keras, task):
    """Returns a model whose outputs are the losses, since a loss of `fit` does not see the ids."""

    class PairLosses(keras.layers.Layer):
        def call(self, inputs):
            user, item, ids = inputs
            return pair_losses(operations(keras), user, item, ids, item, ids)

    vectors = towers(keras, task)
    inputs = {name: keras.Input([], dtype="int32", name=name) for name in ("user", "item")}
    return keras.Model(inputs, PairLosses()([*vectors(inputs), inputs["item"]]))


MODELS = {"mnist": mnist, "char_lm": char_lm, "resnet18": resnet18, "two_tower": two_tower}
