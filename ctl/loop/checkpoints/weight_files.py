"""Reads the weights in files of other libraries: safetensors, HDF5 and .keras, .npz of NumPy."""

from collections.abc import Iterable, Mapping
import dataclasses
import io
import os
import re
import zipfile

import h5py  # type: ignore[import-untyped]
import numpy as np
import safetensors
from safetensors.numpy import load_file
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.loop.checkpoints.matching import Variable


class WeightFile:
    """The weights in a file; the `source` of a variable is its value.

        WeightFile("resnet50.safetensors").variables[0].name        # "conv1.weight"

    Names in files of Keras are those of the variables, such as "dense/kernel", or the layer and the
    number of the variable in it: "dense/0".

    Args:
        path: a file with one of `ctl.configs.values.WEIGHT_FILES` as its suffix.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, path: str):
        try:
            values = _read(path)
        except (OSError, KeyError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
            raise ValueError(str(error)) from error
        self.variables = [
            Variable(name, value.shape, tf.as_dtype(value.dtype), value, node=number)
            for number, (name, value) in enumerate(values.items())
        ]

    def value(self, variable: Variable) -> np.ndarray:
        """Returns the value of one of the variables."""
        value: np.ndarray = variable.source
        return value

    def name_of(self, variable: Variable) -> str:
        """Returns the name in the file of a variable that `match` returned."""
        return self.variables[variable.node].name

    def match(
        self,
        variables: Iterable[Variable],
        model: tf_keras.Model,
        *,
        names: Mapping[str, str],
        layout: str,
    ) -> list[Variable]:
        """Finds the weights of a model's variables.

        Args:
            variables: the variables of the model.
            model: the model.
            names: pattern of the model's names -> name in the file; the text that each * stands for is
                inserted for the * of the name in the file.
            layout: "torch" if kernels are [outputs, inputs, ...].

        Returns:
            The file's variables with the names and the layout of the model's.

        Raises:
            UsageError: a pattern matches no variable.
        """
        variables, saved = list(variables), {v.name: v for v in self.variables}
        _check_patterns(variables, names)
        numbers = {
            id(weight): f"{layer.name}/{number}"
            for layer in model._flatten_layers(recursive=True, include_self=False)
            for number, weight in enumerate(layer.weights)
        }
        found = []
        for variable in variables:
            name = map_name(variable.name, names)
            candidates = [name] if name else [variable.name, numbers.get(id(variable.source), "")]
            # A model of Keras puts its own name before that of a layer.
            ends = [k for k in saved if not name and k.endswith(f"/{variable.name}")]
            candidates += ends if len(ends) == 1 else []
            match = next((saved[name] for name in candidates if name in saved), None)
            if match:
                value = match.source
                if layout == "torch" and variable.name.endswith("kernel") and value.ndim > 1:
                    # [outputs, inputs, *window] -> [*window, inputs, outputs]; depthwise kernels are
                    # [*window, inputs, outputs per input].
                    last = (0, 1) if variable.name.endswith("depthwise_kernel") else (1, 0)
                    value = value.transpose(*range(2, value.ndim), *last)
                found.append(
                    dataclasses.replace(match, name=variable.name, shape=value.shape, source=value)
                )
        return found


def map_name(name: str, names: Mapping[str, str]) -> str | None:
    """Returns the name in the file for a variable's name; None if no pattern matches it."""
    for pattern, target in names.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), name)
        if match:
            parts = list(match.groups())
            return re.sub(r"\*", lambda _, parts=parts: parts.pop(0), target)  # type: ignore[misc]
    return None


def _check_patterns(variables: Iterable[Variable], names: Mapping[str, str]) -> None:
    for pattern, target in names.items():
        if target.count("*") > pattern.count("*"):
            raise UsageError(
                f"init.names has {pattern!r} for {target!r}, which has more * than the pattern."
            )
        # A typing error would leave random weights unnoticed.
        if not any(map_name(v.name, {pattern: target}) for v in variables):
            raise UsageError(
                f"init.names has {pattern!r}, which no variable of the model matches (see "
                "--mode=explain)."
            )


def _read(path: str) -> dict[str, np.ndarray]:
    suffix = os.path.splitext(path)[1]
    if suffix == ".safetensors":
        return dict(load_file(path))
    if suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    if suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            return _read_h5(h5py.File(io.BytesIO(archive.read("model.weights.h5"))))
    return _read_h5(h5py.File(path))


def _read_h5(file: h5py.File) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}

    def add(path: str, item: h5py.Group | h5py.Dataset) -> None:
        if not isinstance(item, h5py.Dataset) or path.startswith("optimizer"):
            return
        *folders, last = path.split("/")
        if folders[-1:] == ["vars"]:  # of Keras 3, which writes the name of the layer
            layer = item.parent.attrs.get("name", folders[-2] if len(folders) > 1 else "")
            values[f"{layer}/{last}"] = item[()]
        else:  # layer/name of the variable, in files of models after another folder
            folders = folders[1 + (folders[0] == "model_weights") :]
            values["/".join([*folders, last]).removesuffix(":0")] = item[()]

    with file:
        file.visititems(add)
    return values
