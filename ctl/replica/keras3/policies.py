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


def compute_dtypes() -> set[str]:
    """Returns the dtypes in which new layers compute, of tf_keras and of Keras 3."""
    return {getattr(each.policy(), "compute_dtype", each.floatx()) for each in _packages()}


def check() -> None:
    """Raises UsageError if a model of Keras 3 was built under another policy than the scope's."""
    expected, found = (getattr(each.policy(), "name", each.floatx()) for each in _packages())
    if found != expected:
        raise UsageError(
            f"The model of Keras 3 was built under the dtype policy {found} instead of {expected}: "
            "import keras at the top of the file, set runtime.precision instead of Keras' global "
            "policy, or give single layers a dtype."
        )
