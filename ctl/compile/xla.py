"""Decides which part of the step XLA compiles."""

import os
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.hardware import devices, strategies
from ctl.rows import replicas

_CPU_FLAG = "--tf_xla_cpu_global_jit"
# The strategies whose step may be in a loop. To assign a variable, the others merge their replicas, even
# a single one, which tf.distribute rejects in a loop; except in a program of XLA for GPUs.
LOOP_STRATEGIES = ("default", "one_device")
_OF_COLLECTIVES = ("mirrored", "multi_worker_mirrored")


def choose(
    xla: str,
    *, gpu: bool, replicas: int, sync_batch_norm: bool, shards: bool = False, groups: bool = False,
    chunks: bool = True, strings: bool = False, deterministic: bool = False,
    strategy: str = "one_device",
) -> tuple[str, str]:  # fmt: skip
    """Resolves `runtime.xla`.

    Args:
        xla: one of `ctl.update.config.XLA_MODES`.
        gpu: whether the replicas are on GPUs.
        replicas: the number of replicas.
        sync_batch_norm: whether the model contains collectives.
        shards: whether gradients are summed shard by shard.
        groups: whether gradients are reduced in groups during the backward pass.
        chunks: whether many batches may be sent at a time, to steps that only ctl calls.
        strings: whether a batch contains strings.
        deterministic: whether TensorFlow's op determinism is on, `runtime.deterministic`.
        strategy: the name of the strategy in `hardware.strategies`.

    Returns:
        The mode, never "auto", and the reason in a few words.
    """
    if xla != "auto":
        return xla, "as configured"
    # The order of these checks decides the reason that is reported; the bit-exact guarantee is first.
    if shards:
        return "off", "auto: XLA fuses across logical shards"
    if not gpu:
        return "off", "auto: on CPUs it depends on the model, see --mode=profile_input"
    if deterministic:
        return "off", "auto: XLA has no deterministic gradient of max pooling on GPUs"
    if groups:
        return "off", "auto: a program of XLA would return all gradients at its end"
    if strings:
        return "off", "auto: XLA does not support strings, and the batches contain some"
    if strategies.STRATEGIES[strategy].central:
        return "off", "auto: the variables are on another device"
    if replicas == 1 and strategy not in LOOP_STRATEGIES:
        return "step", f"auto: {strategy} with one replica on a GPU"
    if replicas == 1 and chunks:
        return "loop", "auto: one replica on a GPU"
    if replicas == 1:
        return "step", "auto: one replica on a GPU, with one batch at a time"
    # A jitted function cannot contain merge_call, but clusters form around the collectives.
    if sync_batch_norm:
        return "autocluster", "auto: the model contains collectives"
    return "gradients", "auto: reduction and update stay outside"


def compiles_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA can compile complete steps of several replicas, with their reductions.

    TensorFlow compiles its collectives for GPUs only, by NCCL, which requires one physical GPU per
    replica. Then its strategies do not merge the replicas in a program of XLA.
    """
    if strategies.strategy_name(strategy) not in _OF_COLLECTIVES:
        return False
    gpus, logical = (
        len(found("GPU"))
        for found in (tf.config.list_physical_devices, tf.config.list_logical_devices)
    )
    on_gpus = all("GPU" in device for device in devices.replica_devices(strategy))
    return on_gpus and logical <= gpus


def enable_autoclustering(*, gpu: bool) -> None:
    """Turns TensorFlow's auto-clustering on for this process.

    Args:
        gpu: whether the replicas are on GPUs. On CPUs auto-clustering requires a flag that TensorFlow
            reads once, from the environment.
    """
    # Appended, because the user may have set other flags.
    if not gpu and _CPU_FLAG not in os.environ.get("TF_XLA_FLAGS", ""):
        os.environ["TF_XLA_FLAGS"] = f"{os.environ.get('TF_XLA_FLAGS', '')} {_CPU_FLAG}".strip()
    tf.config.optimizer.set_jit("autoclustering")


def jit(function: Any) -> Any:
    """Returns the function as one XLA program; call it in a replica context."""

    def call(number: tuple[tf.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        with replicas.numbered(*number):
            return function(*args, **kwargs)

    program = traced(call, jit_compile=True)
    return lambda *args, **kwargs: program(replicas.arguments(), *args, **kwargs)
