"""Trains by trainers and steps of Keras 2 and 3, and prints what changed in TensorFlow and Keras.

A program, since the process of the tests has replaced everything before.
"""

import json
import pickle
import sys
import types

import keras
import numpy as np
import tensorflow as tf
from tensorflow.nn import gelu, max_pool
import tf_keras

PACKAGES = ("tensorflow", "tf_keras", "keras")
# Values of the state of TensorFlow, of lazy imports and of annotations.
STATE = (types.ModuleType, dict, list, int, float)


def of_packages(name):
    return str(name).partition(".")[0] in PACKAGES


def owners():
    """Yields the modules of TensorFlow and Keras, and the classes and objects in them."""
    for name, module in list(sys.modules.items()):
        if of_packages(name) and isinstance(module, types.ModuleType):
            yield name, module
            for own, value in list(vars(module).items()):
                cls = value if isinstance(value, type) else type(value)
                if of_packages(cls.__module__):
                    yield f"{name}.{own}", value


def attributes(owner):
    try:
        values = dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:
        values = {}
    slots = () if isinstance(owner, type) else getattr(type(owner), "__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        values[name] = getattr(owner, name, None)
    return values


def contents(value, depth=4):
    """The identity of a value, and of the functions that a function holds."""
    if not depth or not isinstance(value, types.FunctionType):
        return (id(value),)
    held = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
    held = [v for v in held if isinstance(v, types.FunctionType)]
    return id(value), *(contents(v, depth - 1) for v in held)


def snapshot():
    """Returns (owner, attribute) -> its name, its value and its contents."""
    return {
        (id(owner), name): (f"{path}.{name}", value, contents(value))
        for path, owner in owners()
        for name, value in attributes(owner).items()
    }


def changes(before, after):
    """Returns what is another value, or was added: (owner, attribute); or a function's name -> names.

    A function that is the same object, but holds another one, is found in several modules.
    """
    known, found = {owner for owner, _ in before}, {}
    for key, (name, value, content) in after.items():
        is_state = type(value) in STATE or isinstance(value, types.ModuleType)
        if key[0] not in known or is_state or of_packages(type(value).__module__):
            continue
        _, old, old_content = before.get(key, (name, None, None))
        if old_content != content:
            found[value.__name__ if value is old else key] = name
    return found


def build(package):
    layers = package.layers
    return package.Sequential([layers.Dense(3), layers.Dropout(0.5), layers.Dense(1)])


def loss(batch, outputs):
    return tf.square(outputs[:, 0] - batch["label"])


def train(ctl, package):
    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            return build(package)

        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": np.ones([4, 2], "f"), "label": np.ones(4, "f")})

        def per_example_loss(self, batch, outputs):
            return loss(batch, outputs)

    trainer = Trainer(global_batch_size=4, optimizer=package.optimizers.SGD)
    trainer.train(tf.constant(1))
    ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    step = ctl.Step(build(package), package.optimizers.SGD(), loss, global_batch_size=4)
    step({"x": tf.ones([4, 2]), "label": tf.ones(4)})


def main():
    before = snapshot()
    import ctl
    from ctl.private import replaced

    for name in ctl.__all__:  # imports them
        getattr(ctl, name)
    imported = snapshot()
    listed = [each for row in replaced.REPLACED for each in replaced.owners(row)]
    originals = [getattr(owner, name) for owner, name in listed]
    for package in (tf_keras, keras):
        train(ctl, package)
    expected = {
        value.__name__ if getattr(owner, name) is value else (id(owner), name)
        for (owner, name), value in zip(listed, originals, strict=True)
    }
    found = changes(imported, snapshot())
    result = {
        "by an import": [*changes(before, imported).values()],
        "not listed": [name for key, name in found.items() if key not in expected],
        "not replaced": [str(key) for key in expected - found.keys()],
        "replaced": len(found),
        "same names": gelu is tf.nn.gelu and max_pool is tf.nn.max_pool,
        "pickled": pickle.loads(pickle.dumps(gelu)) is gelu,
    }
    print(json.dumps(result))


main()
