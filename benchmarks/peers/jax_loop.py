"""The models in JAX with Flax and Optax.

python -m benchmarks.peers.jax_loop scan|step TASK

"scan" runs many steps in one program, by `jax.lax.scan`; "step" calls one program per step.
"""

import functools

from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.task import run

RATE = 0.2  # of two_tower


class Mnist(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        x = x[..., None]
        for name, features in (("conv1", 32), ("conv2", 64)):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID", name=name)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128, name="dense1")(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10, name="dense2")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(epsilon=1e-5, name="norm1")(x)
        x += nn.MultiHeadDotProductAttention(4, name="attention")(y, mask=mask)
        y = nn.LayerNorm(epsilon=1e-5, name="norm2")(x)
        y = nn.gelu(nn.Dense(512, name="wide")(y), approximate=False)
        return x + nn.Dense(128, name="narrow")(y)


class CharLm(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        tokens, positions = nn.Embed(256, 128, name="tokens"), nn.Embed(64, 128, name="positions")
        mask = nn.make_causal_mask(x)
        x = tokens(x) + positions(jnp.arange(64))
        for i in range(4):
            x = Block(name=f"block{i}")(x, mask)
        return tokens.attend(nn.LayerNorm(epsilon=1e-5, name="norm")(x))


class Convolution(nn.Module):
    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(
            self.features, (self.size, self.size), self.stride, padding=self.size // 2,
            use_bias=False, name="conv",
        )(x)  # fmt: skip
        return nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name="norm")(x)


class ResidualBlock(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.relu(Convolution(self.features, 3, self.stride, name="first")(x, train))
        y = Convolution(self.features, 3, 1, name="second")(y, train)
        if self.stride > 1:
            x = Convolution(self.features, 1, self.stride, name="shortcut")(x, train)
        return nn.relu(x + y)


class ResNet18(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(Convolution(64, 3, 1, name="stem")(x, train))
        for i, (features, stride) in enumerate(
            [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]
        ):
            x = ResidualBlock(features, stride, name=f"block{i}")(x, train)
        return nn.Dense(10, name="output")(x.mean((1, 2)))


MODELS = {"mnist": Mnist, "char_lm": CharLm, "resnet18": ResNet18}


def optimizer(name):
    if name == "mnist":
        return optax.adam(1e-3, eps=1e-7)
    if name == "resnet18":
        return optax.sgd(0.05, momentum=0.9)

    def decayed(parameters):
        names = flatten_dict(parameters)
        return unflatten_dict({k: k[-1] in ("kernel", "embedding") for k in names})

    adamw = optax.adamw(1e-3, b2=0.99, eps=1e-7, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def load_weights(task):
    """Returns the initial weights by the names of Flax."""
    leaves = {"gamma": "scale", "beta": "bias", "embeddings": "embedding"}
    result = {}
    for name, value in task.weights.items():
        first, *rest, leaf = name.split("/")
        rest = ["out" if part == "attention_output" else part for part in rest]
        result[(*first.split("_"), *rest, leaves.get(leaf, leaf))] = jnp.asarray(value)
    return unflatten_dict(result)


def make_step(task):
    """Returns a function (state, batch) -> (state, loss, accuracy), and the initial state."""
    model, optimize = MODELS[task.name](task.dropout), optimizer(task.name)
    parameters = load_weights(task)
    x = jnp.asarray(task.arrays["x"][:1])
    statistics = model.init(jax.random.key(0), x, train=False).get("batch_stats", {})

    def loss_fn(parameters, statistics, x, label, key):
        logits, changes = model.apply(
            {"params": parameters, "batch_stats": statistics}, x, train=True,
            rngs={"dropout": key}, mutable=["batch_stats"],
        )  # fmt: skip
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        return loss, (changes.get("batch_stats", {}), (logits.argmax(-1) == label).mean())

    def step(state, batch):
        parameters, slots, statistics, key = state
        key, dropout = jax.random.split(key)
        x = batch["x"] / 255 if batch["x"].dtype == jnp.uint8 else batch["x"]
        (loss, (statistics, accuracy)), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            parameters, statistics, x, batch["label"], dropout
        )
        updates, slots = optimize.update(gradients, slots, parameters)
        return (optax.apply_updates(parameters, updates), slots, statistics, key), loss, accuracy

    return step, (parameters, optimize.init(parameters), statistics, jax.random.key(1))


def make_sparse_step(task):
    """As `make_step`, for two_tower: updates rows by Adagrad, since Optax has no sparse updates."""
    tables = {k: jnp.asarray(task.weights[f"{k}s/embeddings"]) for k in ("user", "item")}
    sums = {k: jnp.full(table.shape, 1e-6) for k, table in tables.items()}

    def loss_fn(rows, ids):
        scores = rows["user"] @ rows["item"].T
        same = ids[:, None] == ids[None, :]
        positive = (rows["user"] * rows["item"]).sum(1, keepdims=True)
        every = jnp.concatenate([positive, scores - 1e9 * same], 1)
        return (nn.logsumexp(every, 1) - positive[:, 0]).mean()

    def step(state, batch):
        tables, sums = state
        rows = {k: table[batch[k]] for k, table in tables.items()}
        loss, gradients = jax.value_and_grad(loss_fn)(rows, batch["item"])
        new_tables, new_sums = {}, {}
        for k, table in tables.items():  # an id that occurs twice gets the sum of its gradients
            count = len(batch[k])
            ids, place = jnp.unique(
                batch[k], size=count, fill_value=len(table), return_inverse=True
            )
            gradient = jax.ops.segment_sum(gradients[k], place, count)
            new_sums[k] = sums[k].at[ids].add(gradient**2, mode="drop")
            scale = jax.lax.rsqrt(new_sums[k].at[ids].get(mode="clip") + 1e-10)
            new_tables[k] = table.at[ids].add(-RATE * gradient * scale, mode="drop")
        return (new_tables, new_sums), loss, jnp.zeros([])

    return step, (tables, sums)


def train(task, tick, way):
    step, state = (make_sparse_step if task.name == "two_tower" else make_step)(task)
    arrays = {name: jnp.asarray(array) for name, array in task.arrays.items()}
    steps, count = task.steps_per_loop, len(next(iter(arrays.values())))

    def take(state, arrays, rows):
        return step(state, {name: array[rows] for name, array in arrays.items()})

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(state, arrays, order):
        def body(state, rows):
            state, *values = take(state, arrays, rows)
            return state, values

        state, (losses, accuracies) = jax.lax.scan(body, state, order)
        return state, losses.mean(), accuracies.mean()

    one = jax.jit(take, donate_argnums=0)
    draw, start = np.random.default_rng(0), 0
    order = np.arange(count) if task.check else draw.permutation(count)
    while True:
        rows = order[start : start + steps * task.batch].reshape(steps, task.batch)
        if way == "scan":
            state, loss, _ = scan(state, arrays, rows)
            tick.sync = loss.item
        else:
            losses = []
            for each in rows:
                state, loss, _ = one(state, arrays, each)
                losses.append(loss)
            tick.sync = lambda losses=losses: jnp.stack(losses).mean().item()
        tick(steps)
        start += steps * task.batch
        if start == count:
            order, start = draw.permutation(count), 0


if __name__ == "__main__":
    run(train)
