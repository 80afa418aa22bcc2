"""The MNIST network of `benchmarks.models` in JAX: many steps in one `jax.lax.scan`.

    python -m benchmarks.comparisons.jax_scan

The examples are on the device, and a seeded permutation per epoch orders them, as in ctl's loop with
`data.placement=device`. One JSON line per precision goes to stdout. It imports neither ctl nor
TensorFlow, and is not part of the tests: they would have to install JAX, Flax and Optax.
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
import optax

from benchmarks.peers.jax_loop import Mnist, optimizer

DATA = pathlib.Path(__file__).resolve().parent.parent.parent / "experiments" / "data" / "mnist"
SMALL = "--small" in sys.argv
BATCH, STEPS, WINDOWS = (16, 2, 1) if SMALL else (256, 200, 7)
MODEL, OPTIMIZER = Mnist(dropout=0.5), optimizer("mnist")


def read(name, offset, shape):
    raw = gzip.decompress((DATA / name).read_bytes())
    return np.frombuffer(raw, np.uint8, offset=offset).reshape(shape)


def make_loop(images, labels, dtype):
    def loss_fn(parameters, x, y, key):
        narrow = jax.tree.map(lambda value: value.astype(dtype), parameters)
        x = x.astype(dtype) / 255
        logits = MODEL.apply({"params": narrow}, x, True, rngs={"dropout": key})
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(1) == y).mean()

    def step(state, indexes):
        parameters, slots, key = state
        key, dropout = jax.random.split(key)
        x, y = images[indexes], labels[indexes]
        values, g = jax.value_and_grad(loss_fn, has_aux=True)(parameters, x, y, dropout)
        updates, slots = OPTIMIZER.update(g, slots, parameters)
        return (optax.apply_updates(parameters, updates), slots, key), values

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
        parameters = MODEL.init(jax.random.key(0), jnp.zeros([1, 28, 28]), False)["params"]
        state = (parameters, OPTIMIZER.init(parameters), jax.random.key(1))
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
