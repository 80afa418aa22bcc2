"""The private modules of TensorFlow that ctl uses, of TensorFlow 2.18 to 2.22."""

from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.distribute import distribute_lib, one_device_strategy
from tensorflow.python.eager import context, record
from tensorflow.python.framework import config, ops
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.util import nest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

try:
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
except ImportError:  # TensorFlow 2.18
    from tensorflow.tsl.protobuf import coordination_config_pb2

__all__ = [
    "autograph_artifact",
    "autograph_config",
    "config",
    "context",
    "control_flow_util",
    "coordination_config_pb2",
    "distribute_lib",
    "gen_xla_ops",
    "nest",
    "one_device_strategy",
    "ops",
    "record",
    "resource_variable_ops",
    "xplane_pb2",
]
