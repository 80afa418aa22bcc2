"""The precision of a trainer is that of the layers of both packages, within its scope."""

import keras
import pytest
import tf_keras

import ctl
from ctl.keras import precision
from ctl.keras.keras3 import private


@pytest.mark.parametrize("package", [tf_keras, keras], ids=["tf_keras", "keras"])
@pytest.mark.parametrize("name", precision.PRECISIONS)
def test_precision_sets_the_dtypes_of_layers_and_metrics_inside_its_scope(name, package):
    expected = precision.of(name)
    with precision.scope(name):
        layer, metric = package.layers.Dense(1), package.metrics.Mean()
        layer.build([None, 2])
        assert layer.compute_dtype == expected.compute
        assert layer.kernel.dtype == metric.dtype == expected.floatx
    assert package.backend.floatx() == "float32"
    assert package.layers.Dense(1).compute_dtype == "float32"
    with pytest.raises(ctl.UsageError, match="There is no precision 'half': choose one of float64"):
        precision.of("half")


@pytest.mark.parametrize(
    ("package", "set_policy", "set_floatx"),
    [
        (tf_keras, tf_keras.mixed_precision.set_global_policy, tf_keras.backend.set_floatx),
        (keras, private.set_policy, keras.config.set_floatx),
    ],
    ids=["tf_keras", "keras"],
)
def test_policy_that_the_user_set_is_restored_and_the_default_follows_floatx(
    package, set_policy, set_floatx
):
    set_policy("mixed_bfloat16")
    try:
        with precision.scope("float64"):
            pass
        assert package.layers.Dense(1).compute_dtype == "bfloat16"
        assert precision.of_model(None) == "bfloat16"
        set_policy(None)
        with precision.scope("bfloat16"):
            pass
        set_floatx("float64")
        assert package.layers.Dense(1).compute_dtype == "float64"
    finally:
        set_floatx("float32")
        set_policy(None)


def test_default_dtype_reaches_layers_although_a_layer_was_built_before():
    for package in (tf_keras, keras):
        package.layers.Dense(1)
        with precision.floatx_scope("float64"):
            assert package.layers.Dense(1).compute_dtype == "float64"
        assert package.layers.Dense(1).compute_dtype == "float32"
