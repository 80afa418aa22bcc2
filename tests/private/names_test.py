"""The private names of TensorFlow, tf_keras and Orbit that ctl uses exist and behave as ctl expects.

Run this file first with another version of TensorFlow. BUILD.md lists the names.
"""

import ast
import functools
import pathlib
import re

import orbit
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.layers import BatchNormalization

from ctl.keras import private as private_keras
from ctl.private import tensorflow
from ctl.private.tensorflow import one_device_strategy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@functools.cache
def parse_all():
    """The nodes of the syntax tree of each file of ctl."""
    files = (ROOT / "ctl").rglob("*.py")
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in files}


def build_layer():
    """A model in a model, called once, and its parts."""
    dense = tf_keras.layers.Dense(2, activity_regularizer="l2", name="dense")
    inner = tf_keras.Sequential([dense], name="inner")
    model = tf_keras.Sequential([inner, tf_keras.layers.Dropout(0.5, name="dropout")], name="model")
    model(tf.ones([3, 2]))
    return model, dense, model.layers[1]


def layer_order():
    names = [layer.name for layer in build_layer()[0]._flatten_layers()]
    return [name for name in names if "input" not in name]


def build_optimizer():
    variable = tf.Variable(1.0, name="w")
    optimizer = tf_keras.optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay([variable])
    optimizer.build([variable])
    return optimizer, variable


def loss_scale_optimizer():
    return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD())


def counts_without_gradients(optimizer):
    optimizer._internal_apply_gradients([])
    return int(optimizer.iterations) == 1


def uses_weight_decay(optimizer, variable):
    assert optimizer._use_weight_decay(tf.Variable(2.0, name="other"))
    return optimizer._use_weight_decay(variable)


def mean_metric():
    return tf_keras.metrics.MeanMetricWrapper(tf_keras.losses.mse, name="m", sample=3)


def concrete():
    return tf.function(lambda: tf.function(lambda x: x + 1.0)(1.0))


def called():
    function = concrete()
    function()
    return function


def graph_function():
    graph = concrete().get_concrete_function().graph
    (call,) = (op for op in graph.get_operations() if "PartitionedCall" in op.type)
    return graph._get_function(call.get_attr("f").name).graph


def extended():
    return tf.distribute.MirroredStrategy(["CPU:0"]).extended


def central_storage():
    return tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0").extended


def container():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])  # the extended object refers to it weakly
    return strategy.extended._container_strategy()


def replicated():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        return tf.Variable(1.0, name="w")


def autocast():
    dense = tf_keras.layers.Dense(1, dtype="mixed_bfloat16")
    dense.build((1, 1))
    return dense.kernel


def mask_of():
    return tf_keras.layers.Masking()(tf.constant([[[0.0], [1.0]]]))._keras_mask


class Runner(orbit.StandardTrainer):
    def __init__(self):
        super().__init__(tf.data.Dataset.range(2), orbit.StandardTrainerOptions())

    def train_step(self, iterator):
        next(iterator)


def trained():
    runner = Runner()
    runner.train(tf.constant(1))
    return runner


def saved_in_background(folder):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    checkpoint.write(str(folder / "c"), options)
    checkpoint.sync()
    return checkpoint._async_checkpointer_impl


TENSORFLOW = {
    "_aggregation": lambda _: tf.Variable(1.0)._aggregation == tf.VariableAggregation.NONE,
    "_async_checkpointer_impl": lambda folder: saved_in_background(folder) is not None,
    "_async_error": lambda folder: saved_in_background(folder)._async_error is None,
    "_common_name": lambda _: replicated()._common_name == "w",
    "_communication_options": lambda _: extended()._communication_options.bytes_per_pack == 0,
    "_constraint": lambda _: tf.Variable(1.0, constraint=abs)._constraint is abs,
    "_container_strategy": lambda _: container() is not None,
    "_create_variable": lambda _: callable(one_device_strategy.OneDeviceExtended._create_variable),
    "_cross_device_ops": lambda _: central_storage()._cross_device_ops.accumulation_fn is tf.add_n,
    "_get_function": lambda _: graph_function().get_operations(),
    "_get_replica_id_in_sync_group": lambda _: extended()._get_replica_id_in_sync_group(0) == 0,
    "_handle_data": lambda _: (
        tf.Variable(1).handle._handle_data.shape_and_type[0].dtype == tf.int32.as_datatype_enum
    ),
    "_handle_name": lambda _: tf.Variable(1.0, name="w")._handle_name == "w:0",
    "_input_workers_devices": lambda _: len(extended()._input_workers_devices) == 1,
    "_inputs": lambda _: len(tf.data.Dataset.range(2).batch(1)._inputs()) == 1,
    "_join_async_save_thread": lambda path: not saved_in_background(path)._join_async_save_thread(),
    "_list_all_concrete_functions": lambda _: len(called()._list_all_concrete_functions()) == 1,
    "_physical_devices": lambda _: (
        tf.config.list_physical_devices("CPU")[0] in tensorflow.context.context()._physical_devices
    ),
    "_registry": lambda _: "Add" in tensorflow.ops.gradient_registry._registry,
    "_replica_id": lambda _: tf.distribute.get_replica_context()._replica_id == 0,
    "_resource_handle": lambda _: tf.random.Generator.from_seed(1).state.handle is not None,
    "_trackable_children": lambda _: [*build_optimizer()[0]._trackable_children()],
    "_unique_id": lambda _: (v := autocast())._unique_id == v._variable._unique_id,
    "_variant_tensor": lambda _: tf.data.Dataset.range(2)._variant_tensor.dtype == tf.variant,
}
TF_KERAS = {
    "_SEED_GENERATOR": lambda _: private_keras.backend._SEED_GENERATOR is not None,
    "_autocast_dtype": lambda _: private_keras.autocast_variable._autocast_dtype is not None,
    "_build_learning_rate": lambda _: build_optimizer()[0]._build_learning_rate(0.25) == 0.25,
    "_built": lambda _: build_optimizer()[0]._built,
    "_callable_losses": lambda _: build_layer()[1]._callable_losses == [],
    "_deduplicate_sparse_grad": lambda _: build_optimizer()[0]._deduplicate_sparse_grad([1]) == [1],
    "_eager_losses": lambda _: len(build_layer()[1]._eager_losses) == 1,
    "_exclude_from_weight_decay": lambda _: build_optimizer()[0]._exclude_from_weight_decay,
    "_flatten_layers": lambda _: layer_order() == ["model", "inner", "dense", "dropout"],
    "_fn": lambda _: mean_metric()._fn is tf_keras.losses.mse,
    "_fn_kwargs": lambda _: mean_metric()._fn_kwargs == {"sample": 3},
    "_get_training_value": lambda _: BatchNormalization()._get_training_value(True),
    "_global_policy": lambda _: private_keras.policy._global_policy is None,
    "_index_dict": lambda _: list(build_optimizer()[0]._index_dict.values()) == [0],
    "_internal_apply_gradients": lambda _: counts_without_gradients(build_optimizer()[0]),
    "_is_graph_network": lambda _: tf_keras.Sequential([tf_keras.Input([1])])._is_graph_network,
    "_keras_mask": lambda _: mask_of().numpy().tolist() == [[False, True]],
    "_learning_rate": lambda _: float(build_optimizer()[0]._learning_rate) == 0.5,
    "_loss_scale": lambda _: loss_scale_optimizer()._loss_scale() == 2**15,
    "_losses": lambda _: isinstance(build_layer()[1]._losses, list),
    "_no_dependency": lambda _: build_optimizer()[0]._no_dependency([1]),
    "_non_trainable_weights": lambda _: build_layer()[1]._non_trainable_weights == [],
    "_param_dtype": lambda _: BatchNormalization(dtype="float16")._param_dtype == tf.float32,
    "_random_generator": lambda _: hasattr(build_layer()[2]._random_generator, "_seed"),
    "_rng_type": lambda _: build_layer()[2]._random_generator._rng_type is not None,
    "_self_tracked_trackables": lambda _: len(build_layer()[0]._self_tracked_trackables) >= 2,
    "_serialize_hyperparameter": lambda _: build_optimizer()[0]._serialize_hyperparameter(2) == 2,
    "_trainable": lambda _: build_layer()[1]._trainable is True,
    "_trainable_weights": lambda _: len(build_layer()[1]._trainable_weights) == 2,
    "_use_weight_decay": lambda _: not uses_weight_decay(*build_optimizer()),
    "_var_key": lambda _: isinstance(build_optimizer()[0]._var_key(tf.Variable(1.0)), str),
}
ORBIT = {
    "_enabled": lambda _: (
        orbit.utils.SummaryManager(None, tf.summary.scalar, tf.Variable(0))._enabled is False
    ),
    "_require": lambda _: callable(orbit.Controller._require),
    "_train_loop_fn": lambda _: callable(trained()._train_loop_fn),
    "_train_options": lambda _: trained()._train_options.use_tf_function,
}

ATTRIBUTES = TENSORFLOW | TF_KERAS | ORBIT
# Functions and classes of the private modules.
MEMBERS = {
    "autograph_config": ["CONVERSION_RULES", "DoNotConvert"],
    "config": ["is_op_determinism_enabled"],
    "context": ["context"],
    "control_flow_util": ["GraphOrParentsInXlaContext"],
    "coordination_config_pb2": ["CoordinatedJob"],
    "distribute_lib": ["get_update_replica_id"],
    "gen_xla_ops": [
        "xla_all_reduce",
        "xla_call_module",
        "xla_optimization_barrier",
        "xla_replica_id",
    ],
    "nest": ["flatten_with_joined_string_paths"],
    "one_device_strategy": ["OneDeviceExtended"],
    "ops": ["get_default_graph", "gradient_registry"],
    "record": ["VariableWatcher", "record_operation", "should_record_backprop", "stop_recording"],
    "resource_variable_ops": ["ResourceVariable"],
    "xplane_pb2": ["XSpace"],
}
KERAS_MEMBERS = {
    "autocast_variable": ["_autocast_dtype", "enable_auto_cast_variables"],
    "backend": ["RandomGenerator", "_SEED_GENERATOR"],
    "base_layer_utils": ["call_context"],
    "compile_utils": ["match_dtype_and_rank"],
    "losses_utils": ["apply_mask", "get_mask", "squeeze_or_expand_dimensions"],
    "policy": ["_global_policy"],
}
_PRIVATE_MODULE = re.compile(r"(tensorflow\.(python|compiler|tsl)|tf_keras\.src)\b")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_is_what_ctl_expects(name, tmp_path):
    assert ATTRIBUTES[name](tmp_path)


@pytest.mark.parametrize(
    ("module", "members"),
    [(tensorflow, MEMBERS), (private_keras, KERAS_MEMBERS)],
    ids=["tf", "keras"],
)
def test_members_of_private_modules_exist(module, members):
    assert {*module.__all__} == {*members} | ({"autograph_artifact"} & {*module.__all__})
    for name, attributes in members.items():
        for attribute in attributes:
            assert hasattr(getattr(module, name), attribute), (name, attribute)


def test_only_the_private_modules_import_private_modules():
    found = {
        path.relative_to(ROOT / "ctl").as_posix()
        for path, nodes in parse_all().items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and _PRIVATE_MODULE.match(node.module or "")
    }
    assert found == {"private/tensorflow.py", "keras/private.py"}


def test_list_of_attributes_is_complete():
    """It has the private attributes that ctl reads of other objects, and that ctl does not define."""
    used, own = set(), {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"}
    own |= {"_run_exitfuncs", "_repr_mimebundle_"}  # the second is a protocol of IPython
    for path, nodes in parse_all().items():
        if path.name == "private.py" or path.parent.name == "aot_compile":
            continue  # of Keras 3, and of JAX
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    own.add(node.attr)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    undeclared = {name for name in used - own - {*ATTRIBUTES} if re.match("_[a-zA-Z]", name)}
    assert not {name for name in undeclared if not name.startswith("_ctl_")}


def test_build_lists_the_private_names():
    text = (ROOT / "BUILD.md").read_text()
    for names in (TENSORFLOW, TF_KERAS, ORBIT, MEMBERS, KERAS_MEMBERS):
        assert ", ".join(f"`{name}`" for name in names) in text
