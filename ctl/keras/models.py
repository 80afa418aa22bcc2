"""Models, optimizers and metrics of other packages than tf_keras, seen as those of tf_keras.

Each row of `_PACKAGES` names a package and the module that knows it. The module is imported when an
object of the package is there, or if the process has imported the package. It has the functions that
are called here, and `dtypes`, `reset_names` and `CallState`; see `ctl/keras/keras3/package.py`.
"""

from collections.abc import Iterable
import functools
import importlib
import sys
import types
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.data.source import Nest
from ctl.keras.private import losses_utils

_PACKAGES = {"keras": "ctl.keras.keras3.package"}


class Adapted(tf_keras.Model):
    """A layer or model of another package, seen as a tf_keras model with the same tf.Variables.

    Attributes:
        inner: the layer or model of the other package.
    """

    inner: Any

    def check_built(self) -> None:
        """Raises UsageError if the model cannot be trained where and how it was built."""
        raise NotImplementedError

    def synchronize_batch_norm(self) -> list[str]:
        """Makes plain batch normalizations use the statistics of the global batch.

        Returns:
            The names of the layers that were changed.
        """
        raise NotImplementedError


def adapt(value: Any) -> Any:
    """Returns a layer or model of another package as an `Adapted`; other values as they are.

    The same layer has the same `Adapted` each time. A call also prepares the layers inside that were
    created since the last one.

    Raises:
        UsageError: the model cannot be trained.
    """
    value = inner(value)
    package = _package_of(value)
    return package.adapt(value) if package else value


def inner(value: Any) -> Any:
    """Returns what `adapt` was given for an `Adapted`; other values as they are."""
    return value.inner if isinstance(value, Adapted) else value


def convert(value: Any) -> Any:
    """Returns the tf_keras optimizer or metric for one of another package; other values as they are.

    Raises:
        UsageError: tf_keras has none with these arguments.
    """
    package = _package_of(value)
    return package.convert(value) if package else value


def raw(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the tf.Variables of variables of any package, those that exist already."""
    values = [package.raw(v) if (package := _package_of(v)) else v for v in variables]
    return [value for value in values if value is not None]


def check(value: Any, place: str) -> None:
    """Raises UsageError if a value of tf_keras tracks an object of another package, or is one.

    Args:
        value: any object; one that tracks others is searched completely, such as a model.
        place: what the value is, such as "build_model returned".
    """
    for package in imported():
        package.check(value, place)


def is_foreign(value: Any) -> bool:
    """Returns whether the class of a value, or a base class of it, is from another package."""
    return _package_of(value) is not None


def is_layer(value: Any) -> bool:
    """Returns whether a value is a layer or model, of any package."""
    package = _package_of(value)
    return package.is_layer(value) if package else isinstance(value, tf_keras.layers.Layer)


def with_tf_keras(module: Any) -> Any:
    """Returns a copy of the module tf whose `keras` is tf_keras, and not Keras 3.

    The module of SpectralNormalization is the only one of tf_keras that uses tf.keras, whose InputSpec
    tf_keras rejects if it is Keras 3.
    """
    return types.SimpleNamespace(**{**vars(module), "keras": tf_keras})


def reset_names() -> None:
    """Numbers layers without a name of their own from the beginning, in all packages."""
    tf_keras.backend.reset_uids()
    for package in imported():
        package.reset_names()


def imported() -> list[Any]:
    """Returns the modules of `_PACKAGES` whose packages the process has imported."""
    return [importlib.import_module(m) for name, m in _PACKAGES.items() if name in sys.modules]


def _package_of(value: Any) -> Any:
    name = _find_package(type(value).__mro__)
    return importlib.import_module(_PACKAGES[name]) if name else None


@functools.lru_cache(1024)  # each training loop asks for every attribute of the trainer
def _find_package(classes: tuple[type, ...]) -> str:
    """Returns the package of `_PACKAGES` that a class is from; "" if it is from none."""
    names = (str(each.__module__).partition(".")[0] for each in classes)
    return next((name for name in names if name in _PACKAGES), "")


def masks_of(outputs: Nest) -> list[tf.Tensor | None]:
    """Returns the mask that tf_keras attached to each of the outputs, or None."""
    return [losses_utils.get_mask(output) for output in tf.nest.flatten(outputs)]


def attach_masks(outputs: Nest, masks: list[tf.Tensor | None]) -> None:
    """Attaches masks to outputs that a compiled function has returned without their attributes."""
    for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
        if mask is not None:
            output._keras_mask = mask
