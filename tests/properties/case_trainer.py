"""Runs a `Case`, and compares it with the same update on one replica."""

import functools

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.errors import UsageError
from ctl.update.part import variables_of_state
from tests.properties import layers
from tests.properties.case import EXAMPLES, OPTIMIZERS, Case

STEPS = 2
# Rounding errors of sums in another order; the loss of a row is about 1.
TOLERANCE = 1e-10

make_strategy = functools.cache(testing.make_strategy)
L = tf_keras.layers
BOUNDS = {"global_norm": 0.1, "norm": 0.05, "value": 0.02}
GROUPS = {"scaled": {"learning_rate_scale": 0.1}, "frozen": {"frozen": True}}


@functools.cache
def make_examples(name: str) -> dict[str, np.ndarray]:
    """Makes distinct examples of one kind of input; their sizes differ by a factor of up to 30."""
    draw = np.random.default_rng(0)
    shape, _ = layers.INPUTS[name]
    if "tokens" in name:
        x = draw.integers(0, layers.TOKENS, [EXAMPLES, *shape])
        x[:, 0] = draw.integers(1, layers.TOKENS, EXAMPLES)  # a row with no token has no average
    else:
        x = draw.normal(size=[EXAMPLES, *shape])
        x *= draw.uniform(0.1, 3, [EXAMPLES] + [1] * len(shape))
    weights = draw.uniform(0.2, 3, [EXAMPLES, layers.STEPS])
    return {
        "x": x,
        "class": draw.integers(0, layers.CLASSES, EXAMPLES),
        "value": draw.normal(size=EXAMPLES),
        "steps": draw.normal(size=[EXAMPLES, layers.STEPS]),
        "weight": weights,
        "factor": np.ones(EXAMPLES),
        "number": np.arange(EXAMPLES),
    }


class Trainer(ctl.StandardTrainer):
    """Trains the model of a case."""

    def __init__(self, case: Case):
        self.case = case
        converts = "batch_norm" in case.layers
        super().__init__(
            strategy=make_strategy(case.replicas),
            global_batch_size=case.batch,
            optimizer=OPTIMIZERS[case.optimizer],
            options=ctl.TrainerOptions(
                precision="float64",
                seed=case.seed,
                micro_batches=case.micro_batches,
                logical_shards=case.logical_shards,
                shard_state=case.shard_state,
                clip=ctl.Clip(**{k: v for k, v in BOUNDS.items() if k == case.clip}),
                on_non_finite="skip" if case.skip_nan else "stop",
                ema_decay=0.5 if case.ema else 0.0,
                norms=case.norms,
                optimizer_groups=[
                    {"variables": "output_*", **v} for k, v in GROUPS.items() if k == case.group
                ],
                model={"sync_batch_norm": True} if converts else {},
            ),
        )

    def build_model(self):
        case = self.case
        shape, kind = layers.INPUTS[case.input]
        arguments = {"recompute": case.recompute, "penalty": case.penalty}
        is_token = "tokens" in case.input
        x = inputs = L.Input(shape, dtype=tf.int64 if is_token else tf.float64)
        if is_token:
            mask_zero = case.input == "masked_tokens"
            x = L.Embedding(layers.TOKENS, layers.WIDTH, mask_zero=mask_zero)(x)
        x = layers.apply_layers(case.body, kind, x, **arguments)
        if case.outputs != ("steps",):
            pools = {"sequence": L.GlobalAveragePooling1D, "image": L.GlobalAveragePooling2D}
            x = pools[kind]()(x) if kind in pools else x
            x = layers.apply_layers(case.head, "vector", x, **arguments)
        widths = {"class": layers.CLASSES, "value": 1, "steps": 1}
        outputs = {n: L.Dense(widths[n], name=f"output_{n}")(x) for n in case.outputs}
        return tf_keras.Model(inputs, outputs)

    def build_dataset(self, split, input_context):
        case, examples = self.case, make_examples(self.case.input)
        if case.data == "arrays":
            return ctl.data.arrays(examples)
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        if case.data == "dataset":
            return dataset
        rows = dataset.repeat().take(case.batch + case.second_batch)
        return ctl.data.GlobalBatches(rows.batch(case.batch))

    def preprocess(self, batch):
        if self.case.skip_nan:
            nan = tf.constant(np.nan, tf.float64)
            factor = tf.where(batch["number"] == 3, nan, batch["factor"])
            batch = {**batch, "factor": factor}
            if batch["x"].dtype.is_floating:
                factor = tf.reshape(factor, [-1] + [1] * (batch["x"].shape.rank - 1))
                batch["x"] *= factor
        return batch

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        total, entropy = 0.0, tf_keras.losses.sparse_categorical_crossentropy
        for name, output in outputs.items():
            if name == "class":
                total += entropy(batch[name], output, from_logits=True)
            else:
                total += tf.square(output[..., 0] - batch[name])
        factor = batch["factor"]
        return total * (factor[:, tf.newaxis] if "steps" in outputs else factor)

    def sample_weight(self, batch):
        case, weight = self.case, batch["weight"]
        if case.weights == "none":
            # Losses of positions require weights of their shape.
            return tf.ones_like(weight) if "steps" in case.outputs else None
        if "steps" not in case.outputs:
            weight = weight[:, 0]
        if case.weights == "some_zero":
            return tf.where(weight < 1.5, tf.zeros_like(weight), weight)
        return tf.zeros_like(weight) if case.weights == "all_zero" else weight

    def build_metrics(self):
        return {"mean": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        output = next(iter(outputs.values()))
        flat = tf.reshape(output, [tf.shape(output)[0], -1])
        metrics["mean"].update_state(tf.reduce_sum(flat, 1), weights)

    def replica_step(self, batch):
        if not self.case.updates:
            return super().replica_step(batch)

        def losses(rows):
            return self.per_example_loss(rows, self.forward(rows, training=True))

        return [self.minimize(batch, losses) for _ in range(self.case.updates)][-1]


def train(case: Case) -> dict[str, list[np.ndarray]]:
    """Trains two steps; returns name -> the values of every replica's copy.

    Raises:
        UsageError: ctl rejects the case.
    """
    trainer = Trainer(case)
    outputs = trainer.train(tf.constant(STEPS))
    results = {f"output {name}": [np.asarray(value)] for name, value in outputs.items()}
    results["skipped steps"] = testing.copies(trainer.strategy, trainer.skipped_steps)
    parts = loop_of(trainer).step.parts
    for kind, variables in {
        "variable": trainer.model.variables,
        "slot": trainer.optimizer.variables,
        "average": [v for part in parts for v in variables_of_state(part).get("ema", ())],
    }.items():
        for i, variable in enumerate(variables):
            results[f"{kind} {i}, {variable.name}"] = testing.copies(trainer.strategy, variable)
    return results


def find_differences(case: Case) -> list[str]:
    """Compares a case with the same update on one replica; returns one line per value that differs.

    Raises:
        UsageError: ctl rejects the case.
    """
    actual = train(case)
    try:
        expected = train(case.reference)
    except UsageError as error:
        raise AssertionError(f"only the update of one replica is rejected: {error}") from error
    return compare(actual, expected)


def compare(
    actual: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]
) -> list[str]:
    """Compares two results of `train`, of which the second is that of one replica."""
    lines = []
    for (name, copies), (_, [value]) in zip(actual.items(), expected.items(), strict=True):
        bound = TOLERANCE * max(1.0, np.max(np.abs(value), initial=0.0))
        for replica, copy in enumerate(copies):
            if not np.allclose(copy, value, rtol=0, atol=bound, equal_nan=True):
                own, one = describe(copy), describe(value)
                lines.append(f"{name}: replica {replica} has {own}, one replica {one}")
    return lines


def describe(value: np.ndarray) -> str:
    """The first elements of an array."""
    return np.array2string(value.ravel()[:3], precision=6, floatmode="maxprec")
