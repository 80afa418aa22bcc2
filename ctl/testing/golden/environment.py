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


def describe_environment(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the versions, the CPU, the devices and the options of a trainer, by name."""
    plan, options = engine_of(trainer).plan, trainer.options
    names = sorted({name.partition(":")[0] for name in devices.replica_devices(trainer.strategy)})
    layout = {"strategy": plan.strategy, "replicas": str(plan.layout.replicas)}
    return {
        "ctl": ctl.__version__,
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
        "numpy": np.__version__,
        # Its exponential function and logarithm are used by some kernels.
        "C library": " ".join(platform.libc_ver()),
        "devices": ", ".join(names),
        **(_describe_gpus() if "GPU" in names else {}),
        **host.describe_kernels(tf.config.threading.get_intra_op_parallelism_threads()),
        # With logical shards the order is the same on any number of replicas.
        **({} if options.logical_shards else layout),
        **{key: str(getattr(options, option)) for option, key in OPTION_KEYS.items()},
        "runtime.xla": plan.xla,
        "data.global_batch_size": str(trainer.global_batch_size),
        **{f"model.{name}": str(value) for name, value in options.model.items()},
        "optimizer.clip": str(options.clip),
        **_describe_optimizer(getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)),
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


def _describe_optimizer(optimizer: tf_keras.optimizers.Optimizer) -> dict[str, str]:
    config = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    options = {f"optimizer {k}": str(v) for k, v in config.items() if k != "name"}
    return {"optimizer": type(optimizer).__name__, **options}
