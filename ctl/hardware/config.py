"""The config of the hardware."""

import re
from typing import Any

from ctl.configs.component import Key, Rule, check_strings
from ctl.errors import UsageError
from ctl.hardware import devices, strategies

_TPU = (
    re.compile(r"grpc://[^\s/:,]+:\d{1,5}(,grpc://[^\s/:,]+:\d{1,5})*"),
    re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?"),
    re.compile(r"projects/[a-z][a-z0-9:.-]*/locations/[a-z0-9-]+/nodes/[a-z0-9-]+"),
)


def _check_tpu(key: str, name: str) -> None:
    if name == "local":
        raise UsageError(f"{key} is local: remove it to use the TPU of this machine.")
    if name and not any(form.fullmatch(name) for form in _TPU):
        raise UsageError(
            f"{key} is {name!r}, but must be a name of lower-case letters, digits and hyphens, "
            "projects/PROJECT/locations/ZONE/nodes/NAME, or grpc://HOST:PORT."
        )


def _check_devices(key: str, names: list[Any]) -> None:
    check_strings(key, names, 'names such as "GPU:0"')
    devices.check_names(names)


# fmt: off
KEYS = (
    Key("runtime", {}),
    Key("runtime.strategy", "auto", also=("ddp", "gpus", "distributed", "workers"),
        meant={"ddp": "mirrored"},
        choices=strategies.NAMES, harmless=True,
        text=f"Selects where a step runs: {', '.join(strategies.NAMES)}"
             ". The command ctl devices prints what auto chooses on this machine."),
    Key("runtime.devices", [], also=("gpus",), validate=_check_devices, harmless=True,
        text='Names the devices to use, such as ["GPU:0", "GPU:2"]. If empty, all are used, or the '
             "first one by one_device."),
    Key("runtime.logical_devices", 0, least=0, harmless=True,
        text="Split the first GPU, or the CPU if there is no GPU, into this many devices. With 0, "
             "nothing is split."),
    Key("runtime.tpu", "", validate=_check_tpu, harmless=True,
        text="With the strategy tpu or auto, names a Google Cloud TPU in the project and zone of "
             "this machine, projects/PROJECT/locations/ZONE/nodes/NAME, or the address of a worker "
             'of the TPU, grpc://HOST:PORT. With "", the TPU of this machine is used.'),
    Key("runtime.all_reduce", {}),
    Key("runtime.all_reduce.algorithm", "auto", choices=strategies.ALGORITHMS, harmless=True,
        text="Selects how the gradients of the replicas are summed: by nccl (GPUs), "
             "hierarchical_copy (GPUs of one machine), one_device, ring (several processes), or "
             "auto, which chooses one of them."),
    Key("runtime.all_reduce.timeout", 0.0, least=0, harmless=True,
        text="Sets the seconds that a process waits for the others in one all-reduce. With 0, there "
             "is no limit."),
    Key("runtime.cluster", {}, harmless=True, text="These keys apply to runs of several processes."),
    Key("runtime.cluster.start_timeout", 600.0, least=0,
        text="Sets the seconds to wait at the start until all processes of the run have started."),
    Key("runtime.cluster.heartbeat_timeout", 30.0, least=0,
        bound=(lambda seconds: seconds >= 1, "at least 1"),
        text="Sets the seconds after which a process that cannot be reached counts as lost."),
    Key("runtime.cluster.shard_mib", 0.0, least=0,
        text="Split variables over the parameter servers into shards of at least this many MiB, at "
             "most one per server. With 0, they are not split."),
    Key("runtime.deterministic", False, harmless=True,
        text="Use TensorFlow's deterministic operations, so that every run has the same bits on "
             "GPUs too. They are slower."),
)
# fmt: on


def _is_tpu(values: Any) -> bool:
    return bool(values["runtime.tpu"]) or values["runtime.strategy"] == "tpu"


RULES = (
    Rule(
        lambda v: v["runtime.tpu"] and v["runtime.strategy"] not in ("tpu", "auto"),
        "runtime.tpu has no effect with runtime.strategy={runtime.strategy}",
        "remove it, or choose runtime.strategy=auto",
    ),
    Rule(
        lambda v: _is_tpu(v) and v["runtime.logical_devices"],
        "runtime.logical_devices has no effect on a TPU",
        "set it to 0",
    ),
    Rule(
        lambda v: v["runtime.logical_devices"] > 1 and v["runtime.strategy"] == "one_device",
        "runtime.logical_devices is {runtime.logical_devices}, but runtime.strategy=one_device uses one "
        "device",
        "set runtime.logical_devices=0, or choose runtime.strategy=mirrored",
    ),
)
