"""Describes what the bits of a computation depend on: versions, CPU, devices and options."""

import platform

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl.configs.keys import OPTION_KEYS
from ctl.hardware import devices, host
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer

# Options that determine the order or the precision of floating-point operations, not what is computed.
_COMPUTATION = (
    "runtime.precision",
    "runtime.logical_shards",
    "runtime.all_reduce.dtype",
    "optimizer.gradient_accumulation_steps",
    "optimizer.shard_state",
    "data.placement",
)
# Options that change neither the order or the precision, nor what is computed.
_IRRELEVANT = (
    "runtime.xla",
    "runtime.allow_unkeyed_random",
    "runtime.allow_row_coupling",
    "train.norms",
    "summaries.histogram_interval",
    "data.prefetch",
    "data.cache",
)


def describe_environment(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the versions, the CPU and the devices that a trainer runs with, by name."""
    names = sorted({name.partition(":")[0] for name in devices.replica_devices(trainer.strategy)})
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return {
        "ctl": ctl.__version__,
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
        "numpy": np.__version__,
        # Its exponential function and logarithm are used by some kernels.
        "C library": " ".join(platform.libc_ver()),
        "devices": ", ".join(names),
        **(_describe_gpus() if "GPU" in names else {}),
        **host.describe_kernels(threads),
    }


def _describe_gpus() -> dict[str, str]:
    """Returns the models of the visible GPUs, and whether they round products to TensorFloat-32."""
    models = set()
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        model = details.get("device_name", "unknown model")
        models.add(f"{model}, compute capability {capability}")
    return {
        "GPU": "; ".join(sorted(models)),
        "TensorFloat-32": str(tf.config.experimental.tensor_float_32_execution_enabled()),
    }


def describe_computation(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the options that determine the order and the precision of the operations of a step."""
    plan, options = engine_of(trainer).plan, _options(trainer)
    layout = {"strategy": plan.strategy, "replicas": str(plan.layout.replicas)}
    return {
        # With logical shards the order is the same on any number of replicas.
        **({} if plan.options.logical_shards else layout),
        "runtime.xla": plan.xla,
        **{key: options[key] for key in _COMPUTATION},
    }


def describe_settings(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the other options of a trainer and of its optimizer."""
    skipped = {*_COMPUTATION, *_IRRELEVANT}
    settings = {k: v for k, v in _options(trainer).items() if k not in skipped}
    settings["data.global_batch_size"] = str(trainer.global_batch_size)
    optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
    settings["optimizer"] = type(optimizer).__name__
    config = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    return settings | {f"optimizer {k}": str(v) for k, v in config.items() if k != "name"}


def _options(trainer: StandardTrainer) -> dict[str, str]:
    options = trainer.options
    values = {key: str(getattr(options, option)) for option, key in OPTION_KEYS.items()}
    values["optimizer.clip"] = str(options.clip)
    return values | {f"model.{k}": str(v) for k, v in options.model.items()}
