"""Which part of the step XLA compiles."""

import os
from typing import Any

import tensorflow as tf

MODES = ("auto", "off", "loop", "step", "gradients", "autocluster")
_CPU_FLAG = "--tf_xla_cpu_global_jit"


def choose(
    xla: str,
    *,
    gpu: bool,
    replicas: int,
    sync_batch_norm: bool,
    shards: bool = False,
    chunks: bool = True,
    strings: bool = False,
    strategy: str = "mirrored",
) -> tuple[str, str]:
    """The mode that `runtime.xla` comes to, and why.

    Args:
        xla: one of `MODES`.
        gpu: whether the replicas are on GPUs.
        replicas: how many there are.
        sync_batch_norm: whether the model has collectives inside.
        shards: whether gradients are summed shard by shard.
        chunks: whether many batches may travel at once, to steps that ctl alone calls.
        strategy: where the replicas are, by the name of `hardware.strategies`.
        strings: whether a batch holds strings, which XLA does not take.

    Returns:
        The mode, never "auto", and a reason in a few words.
    """
    if xla != "auto":
        return xla, "as configured"
    if shards:
        return "off", "auto: XLA fuses across logical shards"
    if not gpu:
        return "off", "auto: on CPUs XLA makes small networks slower"
    if strings:
        return "off", "auto: XLA takes no strings, and the batches hold some"
    if strategy in ("central_storage", "parameter_server"):
        return "off", "auto: the variables are on another device"
    if replicas == 1 and chunks:
        return "loop", "auto: one replica on a GPU"
    if replicas == 1:
        return "step", "auto: one replica on a GPU, given batch by batch"
    if sync_batch_norm:
        return "autocluster", "auto: collectives inside the model"
    return "gradients", "auto: reduction and update stay outside"


def enable_autoclustering(*, gpu: bool) -> None:
    """Turns TensorFlow's auto-clustering on, for this process.

    On CPUs it needs a flag that TensorFlow reads once, from the environment.
    """
    if not gpu and _CPU_FLAG not in os.environ.get("TF_XLA_FLAGS", ""):
        os.environ["TF_XLA_FLAGS"] = f"{os.environ.get('TF_XLA_FLAGS', '')} {_CPU_FLAG}".strip()
    tf.config.optimizer.set_jit("autoclustering")


def jit(function: Any) -> Any:
    """The function as one XLA program."""
    return tf.function(function, jit_compile=True)
