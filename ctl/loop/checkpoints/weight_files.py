"""Reads the weights in files of other libraries: safetensors, HDF5 and .keras, .npz of NumPy.

Such a file may come from anyone. A value is read only if a variable has its shape, so that the model
limits the memory, whatever sizes the file declares; and nothing is read that is in another file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import io
import math
import os
import re
from typing import Any
import zipfile

import h5py  # type: ignore[import-untyped]
import numpy as np
from safetensors.numpy import load_file
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.loop.checkpoints.matching import Variable

_MOST_CHUNK = 2**26  # bytes of HDF5 that are decompressed at once, if a value has fewer
_MOST_EXPANSION = 100  # Keras does not compress what it writes into a .keras file


class WeightFile:
    """The weights in a file; the `source` of a variable is a function that reads its value.

        WeightFile("resnet50.safetensors").variables[0].name        # "conv1.weight"

    Names in files of Keras are those of the variables, such as "dense/kernel", or the layer and the
    number of the variable in it: "dense/0".

    Args:
        path: a file with one of `ctl.configs.values.WEIGHT_FILES` as its suffix.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, path: str):
        with _as_value_errors():
            self.variables = [
                Variable(name, shape, tf.as_dtype(dtype), read, node=number)
                for number, (name, (shape, dtype, read)) in enumerate(_list(path).items())
            ]

    def value(self, variable: Variable) -> np.ndarray:
        """Returns the value of one of the variables."""
        with _as_value_errors():
            value: np.ndarray = variable.source()
        return value

    def name_of(self, variable: Variable) -> str:
        """Returns the name in the file of a variable that `match` returned."""
        return self.variables[variable.node].name

    def match(
        self, variables: Iterable[Variable], model: tf_keras.Model,
        *, names: Mapping[str, str], layout: str,
    ) -> list[Variable]:  # fmt: skip
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
                shape, read = match.shape, match.source
                if layout == "torch" and variable.name.endswith("kernel") and len(shape) > 1:
                    # [outputs, inputs, *window] -> [*window, inputs, outputs]; depthwise kernels are
                    # [*window, inputs, outputs per input].
                    last = (0, 1) if variable.name.endswith("depthwise_kernel") else (1, 0)
                    axes = (*range(2, len(shape)), *last)
                    shape = tuple(shape[axis] for axis in axes)
                    read = functools.partial(_transposed, read, axes)
                found.append(
                    dataclasses.replace(match, name=variable.name, shape=shape, source=read)
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


# The shape and the type of an array in a file, and a function that reads its values.
_Entry = tuple[tuple[int, ...], Any, Callable[[], np.ndarray]]


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """Turns the errors of the libraries that read a file into ValueErrors."""
    try:
        yield
    except Exception as error:  # they have no common class
        raise ValueError(str(error) or type(error).__name__) from error


def _transposed(read: Callable[[], np.ndarray], axes: tuple[int, ...]) -> np.ndarray:
    return read().transpose(axes)


def _list(path: str) -> dict[str, _Entry]:
    suffix = os.path.splitext(path)[1]
    if suffix == ".safetensors":  # declares no more than it has, or the library rejects it
        values = load_file(path)
        entries: dict[str, _Entry] = {
            name: (value.shape, value.dtype, functools.partial(values.__getitem__, name))
            for name, value in values.items()
        }
    elif suffix == ".npz":
        entries = _list_npz(zipfile.ZipFile(path))
    elif suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("model.weights.h5")
            if info.file_size > _MOST_EXPANSION * info.compress_size:
                raise ValueError(f"its weights are {info.file_size} bytes in {info.compress_size}")
            entries = _list_h5(h5py.File(io.BytesIO(archive.read(info))))
    else:
        entries = _list_h5(h5py.File(path))
    for name, (_, dtype, _) in entries.items():
        if tf.as_dtype(dtype) == tf.string:  # also of references and objects
            raise ValueError(f"{name} is no array of numbers")
    return entries


def _list_npz(archive: zipfile.ZipFile) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for member in archive.namelist():
        with archive.open(member) as file:
            version = "_".join(map(str, np.lib.format.read_magic(file)))
            shape, _, dtype = getattr(np.lib.format, f"read_array_header_{version}")(file)
        if dtype.kind in "SU":  # such as the names of classes
            continue
        read = functools.partial(_read_npy, archive, member)
        entries[member.removesuffix(".npy")] = (shape, dtype, read)
    return entries


def _read_npy(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _list_h5(file: h5py.File) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}

    def find_link(path: str, link: Any) -> str | None:
        return None if isinstance(link, h5py.HardLink) else path

    def add(path: str, item: h5py.Group | h5py.Dataset) -> None:
        if not isinstance(item, h5py.Dataset) or path.startswith("optimizer"):
            return
        if item.external or item.is_virtual:
            raise ValueError(f"{path} is in another file")
        chunk = math.prod(item.chunks or ()) * item.dtype.itemsize
        if chunk > max(item.nbytes, _MOST_CHUNK):
            raise ValueError(f"{path} has larger chunks than values")
        entry = (tuple(item.shape), item.dtype, lambda: file[path][()])
        *folders, last = path.split("/")
        if folders[-1:] == ["vars"]:  # of Keras 3, which writes the name of the layer
            layer = item.parent.attrs.get("name", folders[-2] if len(folders) > 1 else "")
            entries[f"{layer}/{last}"] = entry
        else:  # layer/name of the variable, in files of models after another folder
            folders = folders[1 + (folders[:1] == ["model_weights"]) :]
            entries["/".join([*folders, last]).removesuffix(":0")] = entry

    if path := file.visititems_links(find_link):  # which h5py would follow
        raise ValueError(f"{path} is a link")
    file.visititems(add)
    return entries
