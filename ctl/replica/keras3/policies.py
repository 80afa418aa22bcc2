"""The global dtype policies of tf_keras and of Keras 3, which layers, losses and metrics read."""

from collections.abc import Callable, Iterator
import contextlib
import sys
from typing import Any, NamedTuple

import tf_keras

from ctl.errors import UsageError
from ctl.private.tf_keras import policy as policy_module
from ctl.replica.arithmetic import precision as precisions
from ctl.replica.keras3 import private


class _Package(NamedTuple):
    """The functions of one of the packages. The policy is None if the user set none."""

    floatx: Callable[[], str]
    set_floatx: Callable[[str], None]
    policy: Callable[[], Any]
    set_policy: Callable[[Any], None]


def _packages() -> list[_Package]:
    # If the user set no policy, a later `set_floatx` must change the default policy, which the public
    # functions would return as if it had been set.
    backend, mixed = tf_keras.backend, tf_keras.mixed_precision
    policy = lambda: policy_module._global_policy  # noqa: E731
    packages = [_Package(backend.floatx, backend.set_floatx, policy, mixed.set_global_policy)]
    config: Any = getattr(sys.modules.get("keras"), "config", None)
    if hasattr(config, "set_dtype_policy"):  # not while keras is being imported
        functions = private.policy, private.set_policy
        packages.append(_Package(config.floatx, config.set_floatx, *functions))
    return packages


@contextlib.contextmanager
def precision_scope(name: str) -> Iterator[None]:
    """Sets the precision of the layers, metrics and optimizers that are built inside."""
    precision = precisions.of(name)
    # Both are needed: the policy sets the dtypes of layers, floatx those of metrics and optimizers.
    with _restored() as packages:
        for package in packages:
            package.set_floatx(precision.floatx)
            package.set_policy(precision.policy)
        yield


@contextlib.contextmanager
def floatx_scope(floatx: str) -> Iterator[None]:
    """Sets the dtype of what is built inside, unless the user set a policy."""
    with _restored() as packages:
        for package in packages:
            package.set_policy(package.policy())  # a layer may have made the default policy
            package.set_floatx(floatx)
        yield


@contextlib.contextmanager
def _restored() -> Iterator[list[_Package]]:
    packages = _packages()
    before = [(package.floatx(), package.policy()) for package in packages]
    try:
        yield packages
    finally:
        for package, (floatx, policy) in zip(packages, before, strict=True):
            package.set_floatx(floatx)
            package.set_policy(policy)


def precision_of(model: Any) -> str:
    """Returns the precision of a model's layers; of new layers of both packages if it is None."""
    if model is None:
        computed = {getattr(each.policy(), "compute_dtype", each.floatx()) for each in _packages()}
    else:
        computed = {v.compute_dtype for v in getattr(model, "_flatten_layers", lambda: [model])()}
    names = ("float16", "bfloat16", "float64")
    return next((name for name in names if name in computed), "float32")


def check_precision(model: tf_keras.layers.Layer, precision: str) -> None:
    """Raises UsageError if the model's layers compute in another precision than the options say."""
    found = precision_of(model)
    if found != precision:
        raise UsageError(
            f"precision is {precision!r}, but the layers of the model compute in {found}: pass a "
            "function that builds the model, or build it under the policy "
            f"{precisions.of(precision).policy} (tf_keras.mixed_precision.set_global_policy, or "
            "keras.config.set_dtype_policy of Keras 3)."
        )


def check() -> None:
    """Raises UsageError if a model of Keras 3 was built under another policy than the scope's."""
    expected, found = (getattr(each.policy(), "name", each.floatx()) for each in _packages())
    if found != expected:
        raise UsageError(
            f"The model of Keras 3 was built under the dtype policy {found} instead of {expected}: "
            "import keras at the top of the file, set runtime.precision instead of Keras' global "
            "policy, or give single layers a dtype."
        )
