"""Loops of public projects and their ports to ctl.Step train the same weights.

The loops are written small and from scratch; docs/real-projects.md has the table. In each class,
`original` is the loop on one device, `port` the loop after the port, and `rows` their number: of 16 all
batches are full, and of 21 the last one has 5 rows, of which 4 replicas hold 2 + 2 + 1 + 0.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

layers, Adam = tf_keras.layers, tf_keras.optimizers.Adam
BATCH = 8


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def batches(data, size=BATCH):
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


class Burgers:
    """github.com/pierremtb/PINNs-TF2.0: one batch, and two means of different points."""

    def __init__(self):
        self.model = tf_keras.Sequential(
            [layers.Dense(6, "tanh", input_shape=[2]), layers.Dense(1, "tanh")]
        )
        self.models, self.optimizer = [self.model], Adam(1e-3)

    def data(self, rows):
        return draw(4, 2), draw(4, 1), draw(rows - 4, 2)

    def original(self, rows):
        x_u, u, x_f = map(tf.convert_to_tensor, self.data(rows))
        x, t = x_f[:, 0:1], x_f[:, 1:2]

        def residual():
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                tape.watch(t)
                u = self.model(tf.stack([x[:, 0], t[:, 0]], axis=1))
                u_x = tape.gradient(u, x)
            return tape.gradient(u, t) + u * u_x - 0.01 * tape.gradient(u_x, x)

        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((u - self.model(x_u)) ** 2) + tf.reduce_mean(residual() ** 2)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )

    def port(self, rows, strategy):
        x_u, u, x_f = self.data(rows)
        counts = [len(x_u), len(x_f)]
        points = {
            "point": np.concatenate([x_u, x_f]),
            "u": np.concatenate([u, 0 * x_f[:, :1]]),
            "is_boundary": np.repeat([True, False], counts),
            "share": np.repeat(rows / np.array(counts), counts),  # two means instead of one
        }

        def loss_fn(batch, _):
            x, t = batch["point"][:, 0:1], batch["point"][:, 1:2]
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                tape.watch(t)
                u = self.model(tf.stack([x[:, 0], t[:, 0]], axis=1))
                u_x = tape.gradient(u, x)
            residual = tape.gradient(u, t) + u * u_x - 0.01 * tape.gradient(u_x, x)
            errors = tf.where(batch["is_boundary"], (batch["u"] - u)[:, 0], residual[:, 0])
            return batch["share"] * errors**2

        step = ctl.Step(
            self.model, self.optimizer, loss_fn, forward=lambda batch, training: None,
            global_batch_size=rows, strategy=strategy,
        )  # fmt: skip
        points = batches(points, rows).repeat(3)
        for batch in strategy.experimental_distribute_dataset(points):
            step(batch)


class Policy(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.mean = tf_keras.Sequential([layers.Dense(6, "tanh", input_shape=[3]), layers.Dense(2)])
        self.value = tf_keras.Sequential(
            [layers.Dense(6, "tanh", input_shape=[3]), layers.Dense(1)]
        )
        self.log_std = self.add_weight("log_std", [2], initializer="zeros")

    def call(self, state):
        return self.mean(state), self.value(state)[:, 0]


class Ppo:
    """github.com/openai/baselines, ppo2: advantages are normalized in each minibatch."""

    def __init__(self):
        self.policy = Policy()
        self.models, self.optimizer = [self.policy], Adam(3e-3, epsilon=1e-5)

    def minibatches(self, rows):
        state, action = draw(rows, 3), draw(rows, 2)
        value, old, reward = draw(rows, 1, 1), draw(rows, 1, 2), draw(rows, 1, 3)
        columns = {"state": state, "action": action}
        columns |= {"value": value[:, 0, 0], "old": old[:, 0, 0] + 3, "return": reward[:, 0, 0]}
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(rows)
            for start in range(0, rows, BATCH):
                batch = {k: v[order[start : start + BATCH]] for k, v in columns.items()}
                advantage = batch["return"] - batch["value"]
                batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                yield batch

    def losses(self, batch, outputs):
        mean, value = outputs
        z = (batch["action"] - mean) / tf.exp(self.policy.log_std)
        neg_log_p = tf.reduce_sum(
            0.5 * z**2 + self.policy.log_std + 0.5 * np.log(2 * np.pi), axis=-1
        )
        entropy = tf.reduce_sum(self.policy.log_std + 0.5 * np.log(2 * np.pi * np.e))
        clipped = batch["value"] + tf.clip_by_value(value - batch["value"], -0.2, 0.2)
        errors = tf.maximum((value - batch["return"]) ** 2, (clipped - batch["return"]) ** 2)
        ratio = tf.exp(batch["old"] - neg_log_p)
        policy = tf.maximum(
            -batch["advantage"] * ratio, -batch["advantage"] * tf.clip_by_value(ratio, 0.8, 1.2)
        )
        return policy, entropy, errors

    def original(self, rows):
        for batch in self.minibatches(rows):
            with tf.GradientTape() as tape:
                policy, entropy, errors = self.losses(batch, self.policy(batch["state"]))
                policy, errors = tf.reduce_mean(policy), tf.reduce_mean(errors)
                loss = policy - 0.01 * tf.reduce_mean(entropy) + 0.5 * 0.5 * errors
            variables = self.policy.trainable_variables
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def port(self, rows, strategy):
        def loss_fn(batch, outputs):
            policy, entropy, errors = self.losses(batch, outputs)
            return policy - 0.01 * entropy + 0.5 * 0.5 * errors

        step = ctl.Step(
            self.policy, self.optimizer, loss_fn, clip=ctl.Clip(global_norm=0.5),
            forward=lambda batch, training: self.policy(batch["state"]),
            global_batch_size=BATCH, strategy=strategy,
        )  # fmt: skip
        spec = {
            k: tf.TensorSpec([None, *v.shape[1:]], v.dtype)
            for k, v in next(self.minibatches(rows)).items()
        }
        data = tf.data.Dataset.from_generator(lambda: self.minibatches(rows), output_signature=spec)
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)


class Gin:
    """github.com/danielegrattarola/spektral, tud_gin.py: a batch is one graph of all nodes."""

    nodes = 4

    def __init__(self):
        self.mlp = layers.Dense(5, input_shape=[3])
        self.norm = ctl.SyncBatchNormalization()
        self.head = layers.Dense(2, kernel_regularizer="l2")
        self.model = GinModel(self.mlp, self.norm, self.head)
        self.models, self.optimizer = [self.model], Adam(1e-2)

    def graphs(self, rows):
        sizes = 1 + np.arange(rows) % self.nodes
        present = np.arange(self.nodes) < sizes[:, None]
        edges = np.abs(draw(rows, self.nodes, self.nodes)) > 0.7
        edges = (edges | edges.transpose(0, 2, 1)) & present[:, None] & present[:, :, None]
        return {
            "x": draw(rows, self.nodes, 3) * present[..., None], "a": edges.astype(float),
            "present": present, "label": np.eye(2)[np.arange(rows) // 2 % 2],
        }  # fmt: skip

    def original(self, rows):
        cross_entropy = tf_keras.losses.CategoricalCrossentropy(from_logits=True)
        for batch in batches(self.graphs(rows)):
            x = tf.boolean_mask(batch["x"], batch["present"])
            graph = tf.where(batch["present"])[:, 0]
            a = tf.linalg.LinearOperatorBlockDiag(
                [tf.linalg.LinearOperatorFullMatrix(each) for each in batch["a"]]
            ).to_dense()
            nodes = tf.reshape(batch["present"], [-1])
            a = tf.boolean_mask(tf.boolean_mask(a, nodes), nodes, axis=1)
            with tf.GradientTape() as tape:
                x = tf.nn.relu(self.norm(self.mlp(x + a @ x), training=True))
                outputs = self.head(tf.math.segment_mean(x, graph))
                loss = cross_entropy(batch["label"], outputs) + sum(self.head.losses)
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def port(self, rows, strategy):
        step = ctl.Step(
            self.model, self.optimizer, tf_keras.losses.CategoricalCrossentropy(from_logits=True),
            global_batch_size=BATCH, strategy=strategy,
        )  # fmt: skip
        for batch in strategy.experimental_distribute_dataset(batches(self.graphs(rows))):
            step(batch)


class GinModel(tf_keras.Model):
    def __init__(self, mlp, norm, head):
        super().__init__()
        self.mlp, self.norm, self.head = mlp, norm, head
        mlp.build([None, 3])
        head.build([None, 5])

    def call(self, batch, training=False):
        x, present = batch["x"], batch["present"]
        x = self.norm(self.mlp(x + batch["a"] @ x), training=training, mask=present)
        weights = tf.cast(present, x.dtype)[..., None]
        return self.head(tf.reduce_sum(tf.nn.relu(x) * weights, 1) / tf.reduce_sum(weights, 1))


class Retrieval:
    """github.com/tensorflow/recommenders: a softmax over the batch, summed over its rows."""

    def __init__(self):
        self.model = TwoTowers()
        self.models, self.optimizer = [self.model], tf_keras.optimizers.Adagrad(0.1)

    def data(self, rows):
        return {"user": np.arange(rows) % 5, "movie": np.arange(rows) * 3 % 7}

    def original(self, rows):
        cross_entropy = tf_keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction=tf_keras.losses.Reduction.SUM
        )
        for batch in batches(self.data(rows)):
            with tf.GradientTape() as tape:
                users, movies = self.model(batch)
                scores = tf.matmul(users, movies, transpose_b=True) / 0.5
                loss = cross_entropy(tf.eye(len(scores)), scores) + sum(self.model.losses)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )

    def port(self, rows, strategy):
        def loss_fn(batch, outputs):
            users, movies = outputs
            everything = ctl.replica.all_gather(movies)
            scores = tf.matmul(users, everything, transpose_b=True) / 0.5
            labels = ctl.replica.positions(movies)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            return losses * tf.cast(len(everything), losses.dtype)  # their sum, not their mean

        step = ctl.Step(
            self.model, self.optimizer, loss_fn, global_batch_size=BATCH, strategy=strategy
        )
        for batch in strategy.experimental_distribute_dataset(batches(self.data(rows))):
            step(batch)


class TwoTowers(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.user = tf_keras.Sequential([layers.Embedding(5, 4), layers.Dense(3)])
        self.movie = tf_keras.Sequential(
            [layers.Embedding(7, 4), layers.Dense(3, kernel_regularizer="l2")]
        )
        self.user(tf.constant([0]))
        self.movie(tf.constant([0]))

    def call(self, batch):
        return self.user(batch["user"]), self.movie(batch["movie"])


class SpeechCtc:
    """github.com/TensorSpeech/TensorFlowASR: CTC, batch normalization, a recurrent layer."""

    def __init__(self):
        inputs = tf_keras.Input([6, 3])
        hidden = layers.Conv1D(4, 3, 1, "same")(inputs)
        hidden = layers.ReLU()(ctl.SyncBatchNormalization()(hidden))
        hidden = layers.Bidirectional(layers.GRU(4, return_sequences=True))(hidden)
        self.model = tf_keras.Model(inputs, layers.Dense(5)(hidden))
        self.models, self.optimizer = [self.model], Adam(1e-2)

    def batches(self, rows, strategy):
        # A replica without rows gets a row of the batch, since CTC accepts no row of zeros.
        size = BATCH if rows % BATCH == 0 else 5
        source = ctl.data.arrays(self.data(rows))
        return itertools.islice(ctl.data.distribute(source, size, strategy), 2)

    def data(self, rows):
        lengths = 1 + np.arange(rows, dtype=np.int32) % 3
        labels = (1 + np.arange(rows * 3, dtype=np.int32).reshape(rows, 3) % 4) * (
            np.arange(3) < lengths[:, None]
        )
        return {
            "signal": draw(rows, 6, 3), "signal_length": 5 + np.arange(rows, dtype=np.int32) % 2,
            "labels": labels, "labels_length": lengths,
        }  # fmt: skip

    def ctc(self, batch, logits):  # TensorFlow computes it in float32 only
        return tf.nn.ctc_loss(
            labels=tf.sparse.from_dense(batch["labels"]), logits=tf.cast(logits, tf.float32),
            label_length=batch["labels_length"], logit_length=batch["signal_length"],
            logits_time_major=False, blank_index=0,
        )  # fmt: skip

    def original(self, rows):
        for batch in self.batches(rows, tf.distribute.get_strategy()):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.ctc(batch, self.model(batch["signal"], training=True)))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )

    def port(self, rows, strategy):
        step = ctl.Step(
            self.model, self.optimizer, self.ctc,
            forward=lambda batch, training: self.model(batch["signal"], training=training),
            global_batch_size=BATCH if rows % BATCH == 0 else 5, strategy=strategy,
        )  # fmt: skip
        for batch in self.batches(rows, strategy):
            step(batch)


class Pair(tf_keras.Model):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


class Pool:
    """Images of earlier steps, on the host."""

    def __init__(self):
        self.rng, self.items = np.random.default_rng(0), []

    def __call__(self, images):
        found = []
        for image in np.asarray(images):
            place = self.rng.integers(6)
            if len(self.items) < 6:
                self.items.append(image)
            elif self.rng.random() > 0.5:
                self.items[place], image = image, self.items[place]
            found.append(image)
        return np.stack(found)


class CycleGan:
    """github.com/LynnHo/CycleGAN-Tensorflow-2: two generators, two critics, pools of images."""

    def __init__(self):
        def generator():
            return tf_keras.Sequential([layers.Conv2D(2, 3, padding="same", input_shape=[4, 4, 2])])

        def critic():
            hidden = layers.Conv2D(3, 3, 2, "same", activation="relu", input_shape=[4, 4, 2])
            return tf_keras.Sequential([hidden, layers.Conv2D(1, 2)])

        self.generators, self.critics = Pair(generator(), generator()), Pair(critic(), critic())
        self.models = [self.generators, self.critics]
        self.optimizers = Adam(2e-3, beta_1=0.5), Adam(2e-3, beta_1=0.5)

    def data(self, rows):
        return {"a": draw(rows, 4, 4, 2), "b": 1 + draw(rows, 4, 4, 2)}

    def original(self, rows):
        mean, absolute, pools = (
            tf.reduce_mean,
            tf_keras.losses.MeanAbsoluteError(),
            (Pool(), Pool()),
        )
        a_to_b, b_to_a = self.generators.first, self.generators.second
        critic_a, critic_b = self.critics.first, self.critics.second

        @tf.function
        def train_generators(a, b):
            with tf.GradientTape() as tape:
                fake_b, fake_a = a_to_b(a, training=True), b_to_a(b, training=True)
                again_a, again_b = b_to_a(fake_b, training=True), a_to_b(fake_a, training=True)
                loss = mean((1 - critic_b(fake_b, training=True)) ** 2)
                loss += mean((1 - critic_a(fake_a, training=True)) ** 2)
                loss += 10 * (absolute(a, again_a) + absolute(b, again_b))
            variables = a_to_b.trainable_variables + b_to_a.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizers[0].apply_gradients(zip(gradients, variables, strict=True))
            return fake_a, fake_b

        @tf.function
        def train_critics(a, b, fake_a, fake_b):
            with tf.GradientTape() as tape:
                loss = mean((1 - critic_a(a, training=True)) ** 2)
                loss += mean(critic_a(fake_a, training=True) ** 2)
                loss += mean((1 - critic_b(b, training=True)) ** 2)
                loss += mean(critic_b(fake_b, training=True) ** 2)
            variables = critic_a.trainable_variables + critic_b.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizers[1].apply_gradients(zip(gradients, variables, strict=True))

        for batch in batches(self.data(rows)):
            fake_a, fake_b = train_generators(batch["a"], batch["b"])
            train_critics(batch["a"], batch["b"], pools[0](fake_a), pools[1](fake_b))

    def port(self, rows, strategy):
        pools = Pool(), Pool()
        a_to_b, b_to_a = self.generators.first, self.generators.second
        critic_a, critic_b = self.critics.first, self.critics.second

        def mean(values):
            return tf.reduce_mean(values, axis=[1, 2, 3])

        def translate(batch, training):
            return b_to_a(batch["b"], training=training), a_to_b(batch["a"], training=training)

        def generator_loss(batch, fakes):
            fake_a, fake_b = fakes
            loss = mean((1 - critic_b(fake_b, training=True)) ** 2)
            loss += mean((1 - critic_a(fake_a, training=True)) ** 2)
            loss += 10 * mean(tf.abs(batch["a"] - b_to_a(fake_b, training=True)))
            return loss + 10 * mean(tf.abs(batch["b"] - a_to_b(fake_a, training=True)))

        def critic_loss(batch, _):
            loss = mean((1 - critic_a(batch["a"], training=True)) ** 2)
            loss += mean(critic_a(batch["fake_a"], training=True) ** 2)
            loss += mean((1 - critic_b(batch["b"], training=True)) ** 2)
            return loss + mean(critic_b(batch["fake_b"], training=True) ** 2)

        shared = {"global_batch_size": BATCH, "strategy": strategy}
        generator_step = ctl.Step(
            self.generators, self.optimizers[0], generator_loss,
            forward=translate, models=[self.critics], outputs=True, **shared,
        )  # fmt: skip
        critic_step = ctl.Step(
            self.critics, self.optimizers[1], critic_loss,
            forward=lambda batch, training: None, **shared,
        )  # fmt: skip

        def split(batch):
            data = tf.data.Dataset.from_tensors(batch)
            return next(iter(strategy.experimental_distribute_dataset(data)))

        for batch in batches(self.data(rows)):
            fakes = generator_step(split(batch)).outputs
            fakes = [tf.concat(strategy.experimental_local_results(each), 0) for each in fakes]
            batch |= {"fake_a": pools[0](fakes[0]), "fake_b": pools[1](fakes[1])}
            critic_step(split(batch))


PROJECTS = [Burgers, Ppo, Gin, Retrieval, SpeechCtc, CycleGan]


def train(kind, rows, strategy=None):
    tf_keras.utils.set_random_seed(0)
    if strategy is None:
        project = kind()
        project.original(rows)
    else:
        with strategy.scope():
            project = kind()
        project.port(rows, strategy)
    return [weight for model in project.models for weight in model.get_weights()]


SPLITS = [(1, 16), (2, 16), (4, 16), (2, 21), (4, 21)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", PROJECTS)
def test_port_trains_as_the_original_on_any_number_of_replicas(kind, caplog):
    tf_keras.backend.set_floatx("float64")
    try:
        expected = {rows: train(kind, rows) for rows in (16, 21)}
        for replicas, rows in SPLITS:
            found = train(kind, rows, testing.make_strategy(replicas))
            for one, other in zip(found, expected[rows], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    finally:
        tf_keras.backend.set_floatx("float32")
    assert [r.message for r in caplog.records if r.name == "ctl"] == []
