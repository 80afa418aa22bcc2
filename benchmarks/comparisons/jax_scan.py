"""The MNIST network of `benchmarks.models` in JAX: many steps in one `jax.lax.scan`.

    python benchmarks/comparisons/jax_scan.py

The examples are on the device, and a seeded permutation per epoch orders them, as in ctl's loop with
`data.placement=device`. One JSON line per precision goes to stdout. It imports neither ctl nor
TensorFlow, and is not part of the tests: they would have to install JAX.
"""

import functools
import gzip
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

DATA = pathlib.Path(__file__).resolve().parent.parent.parent / "experiments" / "data" / "mnist"
SMALL = "--small" in sys.argv
BATCH, STEPS, WINDOWS = (16, 2, 1) if SMALL else (256, 200, 7)
BETA_1, BETA_2, EPSILON, RATE = 0.9, 0.999, 1e-7, 1e-3
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def read(name, offset, shape):
    return np.frombuffer(
        gzip.decompress((DATA / name).read_bytes()), np.uint8, offset=offset
    ).reshape(shape)


def initialize(key):
    """Glorot-uniform kernels, as in Keras, and zero biases."""
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (1600, 128),
        "dense2": (128, 10),
    }
    parameters = {}
    for each, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        kernel = jax.nn.initializers.glorot_uniform()(each, shape)
        parameters[name] = (kernel, jnp.zeros(shape[-1]))
    return parameters


def forward(parameters, x, key, dtype):
    def convolve(x, name):
        kernel, bias = parameters[name]
        x = jax.lax.conv_general_dilated(
            x, kernel.astype(dtype), (1, 1), "VALID", dimension_numbers=DIMENSIONS
        )
        x = jax.nn.relu(x + bias.astype(dtype))
        low = np.asarray(-np.inf, dtype)  # not of JAX, which must know the value to differentiate
        return jax.lax.reduce_window(x, low, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def dense(x, name):
        kernel, bias = parameters[name]
        return x @ kernel.astype(dtype) + bias.astype(dtype)

    x = x.astype(dtype)[..., None] / 255
    x = convolve(convolve(x, "conv1"), "conv2").reshape(x.shape[0], -1)
    x = jax.nn.relu(dense(x, "dense1"))
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
    return dense(x, "dense2").astype(jnp.float32)


def make_loop(images, labels, dtype):
    def loss_fn(parameters, x, y, key):
        logits = forward(parameters, x, key, dtype)
        losses = jax.nn.logsumexp(logits, 1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
        return losses.mean(), (logits.argmax(1) == y).mean()

    def step(state, indexes):
        parameters, m, v, count, key = state
        key, dropout = jax.random.split(key)
        x, y = images[indexes], labels[indexes]
        (loss, accuracy), g = jax.value_and_grad(loss_fn, has_aux=True)(parameters, x, y, dropout)
        count += 1
        m = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, m, g)
        v = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, v, g)
        rate = RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
        parameters = jax.tree.map(
            lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPSILON), parameters, m, v
        )
        return (parameters, m, v, count, key), (loss, accuracy)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state, key):
        # Two permutations of a part of the epoch cost as much as those of ctl's sampler.
        order = jax.random.permutation(key, len(labels))[: STEPS * BATCH].reshape(STEPS, BATCH)
        state, (losses, accuracies) = jax.lax.scan(step, state, order)
        return state, losses.mean(), accuracies.mean()

    return loop


def main():
    images = jnp.asarray(read("train-images-idx3-ubyte.gz", 16, (-1, 28, 28)))
    labels = jnp.asarray(read("train-labels-idx1-ubyte.gz", 8, (-1,)).astype(np.int32))
    for dtype in (jnp.float32, jnp.bfloat16):
        parameters = initialize(jax.random.key(0))
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        state = (parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros([]), jax.random.key(1))
        loop, rates = make_loop(images, labels, dtype), []
        for window in range(WINDOWS + 2):
            start = time.perf_counter()
            state, loss, accuracy = loop(state, jax.random.key(window))
            loss = float(loss)
            rates.append(STEPS * BATCH / (time.perf_counter() - start))
        line = {
            "name": f"jax {jax.__version__} scan, {jnp.dtype(dtype).name}, data on the device",
            "model": "mnist256",
            "device": jax.devices()[0].device_kind,
            "examples_per_second": round(statistics.median(rates[2:])),
            "windows": [round(rate) for rate in rates[2:]],
            "loss": round(loss, 4),
            "accuracy": round(float(accuracy), 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
