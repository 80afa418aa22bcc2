"""The config of a step: precision, XLA, reductions, micro-batches, clipping and non-finite steps."""

from ctl.configs.component import Key, Rule, Values
from ctl.errors import UsageError
from ctl.hardware.strategies import STRATEGIES, StrategySpec

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
XLA_MODES = ("auto", "off", "loop", "step", "gradients", "autocluster")
ON_NON_FINITE = ("stop", "skip", "rollback", "ignore")
COMPLETE_STEPS = ("loop", "step")

# fmt: off
KEYS = (
    Key("model.sync_batch_norm", False, optional=True, also=("batch norm", "bn"),
        text="Normalize by the statistics of the global batch (true), or by those of each "
             "micro-batch of all replicas (per_micro_batch). With false, each replica uses its own "
             "rows."),
    Key("model.recompute", "", optional=True, also=("gradient checkpointing", "remat"),
        text="With blocks, compute activations again in the backward pass, to save memory, where "
             "the code of the model reads this key and calls ctl.recompute."),
    Key("runtime.precision", "float32", also=("fp16", "bf16", "amp", "dtype"),
        meant={"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
        choices=PRECISIONS, option="precision",
        text="Selects the dtype in which layers compute. With bfloat16 and float16, the variables "
             "stay in float32. With float64, they are in float64, too."),
    Key("runtime.loss_scale", 0.0, least=0, option="loss_scale",
        text="With float16, fixes the loss scale at this value. With 0, it is dynamic."),
    Key("runtime.xla", "auto", choices=XLA_MODES, option="xla", harmless=True,
        text="Selects what XLA compiles: off, loop (many complete steps, on one replica or on GPUs), "
             "step (one complete step, as loop), gradients (the forward and backward pass), "
             "autocluster (the parts that TensorFlow selects), or auto, which chooses on GPUs the "
             "fastest of these that the strategy and the model support, and on CPUs off. The "
             "command ctl profile_input compares the modes."),
    Key("runtime.kernels", "auto", choices=("auto", "off"), option="kernels", harmless=True,
        text="With auto, where XLA compiles the step for a GPU, attention in 16 bits is one kernel "
             "that stores no matrix of length x length (ctl explain shows which layers have it), and "
             "GELU in 16 bits and max pooling have gradients that store and read less. With off, "
             "TensorFlow computes all three."),
    Key("runtime.logical_shards", 0, least=0, option="logical_shards",
        text="Compute the gradient as the sum of this many shards in a fixed order, which has the "
             "same bits on any number of replicas that divides it. The all-reduce then sends this "
             "many times the bytes. With 0, this is off."),
    Key("runtime.all_reduce.dtype", "", choices=("", "bfloat16"), option="all_reduce_dtype",
        text='With bfloat16, the gradients are rounded and sent in half the bytes. With "", they '
             "are sent in their own dtype."),
    Key("runtime.all_reduce.bucket_mib", 0.0, least=0, harmless=True,
        text="With several processes, reduce the gradients in packs of about this many MiB, each as "
             "soon as the backward pass has computed it, which XLA would prevent. With 0, packs "
             "have 32 MiB, to save memory, and may be reduced after the backward pass."),
    Key("runtime.allow_unkeyed_random", False, option="allow_unkeyed_random", harmless=True,
        text="Accept random operations that ctl cannot make a function of the seed, the step and "
             "the row, such as tf.random.uniform in a layer. The update then depends on how the "
             "batch is split, and on how often the run was resumed."),
    Key("runtime.allow_row_coupling", False, option="allow_row_coupling", harmless=True,
        text="Accept losses in which a row depends on other rows of its replica or micro-batch, "
             "such as local negatives. The update then depends on how the batch is split."),
    Key("loss_weights", {}, free=True, option="loss_weights", elements="float",
        text="Holds the factors of the losses that per_example_loss returns as a dict, by name, "
             "such as dict(digit=1.0, parity=0.3). The sum of the products is minimized, and each "
             "loss is also reported as NAME_loss."),
    Key("optimizer.micro_batches", 1, least=1,
        also=("gradient accumulation", "accumulate_grad_batches", "accumulation"),
        option="micro_batches", harmless=True,
        text="Divide the batch of each replica into this many micro-batches, to save memory. The "
             "update does not depend on their number."),
    Key("optimizer.clip", {},
        text="These keys bound the gradient of the global batch. Set at most one of them."),
    Key("optimizer.clip.global_norm", 0.0, least=0, option="clip_global_norm",
        text="Scale all gradients of the global batch to at most this joint norm. With 0, this is "
             "off."),
    Key("optimizer.clip.norm", 0.0, least=0, option="clip_norm",
        text="Scale each gradient of the global batch to at most this norm. With 0, this is off."),
    Key("optimizer.clip.value", 0.0, least=0, option="clip_value",
        text="Clip each element of the gradients of the global batch to [-value, value]. With 0, "
             "this is off."),
    Key("train.on_non_finite", "stop", choices=ON_NON_FINITE, option="on_non_finite",
        text="Selects what happens after a step whose loss or gradients are not finite: stop (the "
             "run ends after the inner loop without saving), skip (the update is not applied), "
             "rollback (the run restores its last checkpoint and continues without that batch, at "
             "most 10 times), or ignore (nothing is checked)."),
    Key("train.loss_spike", 0.0, least=0,
        option="loss_spike", bound=(lambda factor: factor == 0 or factor > 1,
                                    "greater than 1, such as 3.0, or 0 for no limit"),
        text="Treat a step like one that is not finite (train.on_non_finite) if its loss is more "
             "than this many times the median of the last 101 losses. With 0, this is not checked."),
)
# fmt: on
_CLIP = ("optimizer.clip.global_norm", "optimizer.clip.norm", "optimizer.clip.value")


def spec(v: Values) -> StrategySpec:
    """Returns the strategy."""
    return STRATEGIES[v["strategy"]]


def reduces_in_xla(v: Values) -> bool:
    """Returns whether XLA compiles the reductions over the replicas."""
    return v["runtime.xla"] in COMPLETE_STEPS and v["replicas"] > 1


def _check_clip(v: Values) -> None:
    bounds = [key for key in _CLIP if v[key]]
    if len(bounds) > 1:
        raise UsageError(f"{' and '.join(bounds)} are set: set one of them, and the others to 0.")


# Besides keys, these rules read facts:
#   strategy           its name in `hardware.strategies`, such as "central_storage"
#   cpu_collectives    whether TensorFlow reduces gradients between processes on CPUs
#   replicas, batch    the number of replicas, and the global batch size
#   rows_per_replica   the largest per-replica batch size; None if it is not known
#   full_batches       whether every global batch has exactly `batch` examples
#   string_features    whether the batches contain strings
#   sync_batch_norm    whether the model has synchronized batch normalization
#   per_micro_batch    whether it was requested per micro-batch
#   compiles_collectives  whether XLA can compile the reductions over the replicas
RULES = (
    _check_clip,
    Rule(
        lambda v: v["data.placement"] == "device" and v["runtime.xla"] != "loop",
        "data.placement=device requires runtime.xla=loop, which reads examples on the device",
        "set runtime.xla=loop, or data.placement=stream",
    ),
    Rule(
        lambda v: v["runtime.loss_scale"] and v["runtime.precision"] != "float16",
        "runtime.loss_scale has no effect without runtime.precision=float16",
        "set runtime.loss_scale=0",
    ),
    Rule(
        lambda v: v["train.loss_spike"] and v["train.on_non_finite"] == "ignore",
        "train.loss_spike has no effect with train.on_non_finite=ignore",
        "set train.loss_spike=0, or choose train.on_non_finite=stop, skip or rollback",
    ),
    Rule(
        lambda v: v["runtime.all_reduce.bucket_mib"] and v["runtime.xla"] not in ("auto", "off"),
        "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and a program of XLA "
        "returns all of its results at its end",
        "set runtime.xla=off, or runtime.all_reduce.bucket_mib=0",
    ),
    Rule(
        lambda v: v["runtime.precision"] == "float16" and not spec(v).replica_values,
        "runtime.precision=float16 requires a loss scale, which tf_keras does not support under "
        "central storage, parameter servers and TPUs",
        "choose runtime.precision=bfloat16",
    ),
    Rule(
        lambda v: v["runtime.precision"] == "float64" and spec(v).tpu,
        "runtime.precision=float64 is not supported by TPUs",
        "choose runtime.precision=float32 or bfloat16",
    ),
    Rule(
        lambda v: v["runtime.xla"] == "gradients" and spec(v).central,
        "runtime.xla=gradients compiles code that reads variables, which central storage and "
        "parameter servers keep on another device",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda v: v["runtime.xla"] in COMPLETE_STEPS and spec(v).coordinated,
        "runtime.xla=loop and step compile the update, which parameter servers apply on another "
        "machine",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda v: v["runtime.xla"] in COMPLETE_STEPS and v["string_features"],
        "runtime.xla=loop and step compile the complete step, and XLA does not support strings",
        "remove the string features from the batch, or choose runtime.xla=off",
    ),
    Rule(
        lambda v: spec(v).coordinated and (v["runtime.logical_shards"] or v["sync_batch_norm"]),
        "Synchronized batch normalization and runtime.logical_shards combine the replicas of a "
        "step, but the workers of parameter servers compute their steps independently",
        "turn both off, or choose runtime.strategy=multi_worker_mirrored",
    ),
    Rule(
        lambda v: (
            spec(v).coordinated
            and (v["train.on_non_finite"] in ("skip", "rollback") or v["train.loss_spike"])
        ),
        "train.on_non_finite=skip and rollback and train.loss_spike are decisions of all replicas "
        "together, but the workers of parameter servers compute their steps independently",
        "choose train.on_non_finite=stop or ignore, and set train.loss_spike=0",
    ),
    Rule(
        lambda v: spec(v).tpu and v["train.on_non_finite"] == "skip",
        "train.on_non_finite=skip applies the update conditionally, which TensorFlow does not "
        "support on a TPU",
        "choose train.on_non_finite=rollback, stop or ignore",
    ),
    Rule(
        lambda v: v["runtime.all_reduce.dtype"] and spec(v).coordinated,
        "runtime.all_reduce.dtype is the dtype of a reduction, and parameter servers have none",
        'set runtime.all_reduce.dtype=""',
    ),
    Rule(
        lambda v: v["runtime.all_reduce.dtype"] == "bfloat16" and v["cpu_collectives"],
        "runtime.all_reduce.dtype=bfloat16 is not supported by TensorFlow's all-reduce between "
        "processes on CPUs",
        'set runtime.all_reduce.dtype="", or train on GPUs',
    ),
    Rule(
        lambda v: reduces_in_xla(v) and not v["compiles_collectives"],
        "runtime.xla=loop and step compile complete steps, with their reductions over the replicas, "
        "which TensorFlow supports on several GPUs with runtime.strategy=mirrored or "
        "multi_worker_mirrored only",
        "choose runtime.xla=gradients, autocluster or off",
    ),
    Rule(
        lambda v: (
            reduces_in_xla(v) and v["rows_per_replica"] == 1 and v["batch"] % v["replicas"] != 0
        ),
        "runtime.xla=loop and step compile the selection of the rows that exist, and XLA cannot select "
        "among one row per replica (batch={batch}, replicas={replicas})",
        "choose a multiple of the replicas, or runtime.xla=gradients",
    ),
    Rule(
        lambda v: v["runtime.xla"] == "gradients" and v["sync_batch_norm"] and v["replicas"] > 1,
        "runtime.xla=gradients compiles the model, and synchronized batch normalization reduces "
        "over the replicas inside the model",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda v: (
            v["rows_per_replica"] is not None
            and v["optimizer.micro_batches"] > v["rows_per_replica"]
        ),
        "optimizer.micro_batches is larger than the per-replica batch "
        "(micro_batches={optimizer.micro_batches}, rows_per_replica={rows_per_replica})",
        "set optimizer.micro_batches to at most the per-replica batch size",
    ),
    Rule(
        lambda v: (
            v["sync_batch_norm"] and v["optimizer.micro_batches"] > 1 and not v["per_micro_batch"]
        ),
        "optimizer.micro_batches splits a batch into micro-batches, and synchronized "
        "batch normalization would use the statistics of a micro-batch",
        "set optimizer.micro_batches=1, or accept them with model.sync_batch_norm=per_micro_batch",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["runtime.logical_shards"] % v["replicas"] != 0,
        "runtime.logical_shards is not a multiple of the number of replicas "
        "(shards={runtime.logical_shards}, replicas={replicas})",
        "choose a multiple, or set runtime.logical_shards=0",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["batch"] % v["runtime.logical_shards"] != 0,
        "The global batch size is not a multiple of runtime.logical_shards "
        "(batch={batch}, shards={runtime.logical_shards})",
        "choose a multiple, or set runtime.logical_shards=0",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and not v["full_batches"],
        "runtime.logical_shards requires full batches of one known size",
        "batch with drop_remainder=True, or return single examples and let ctl batch them",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["sync_batch_norm"],
        "runtime.logical_shards sums gradients in a fixed order, and synchronized batch "
        "normalization sums inside the model",
        "set runtime.logical_shards=0, or use a model without synchronized batch normalization",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["optimizer.micro_batches"] > 1,
        "runtime.logical_shards already computes the gradients shard by shard",
        "set optimizer.micro_batches=1",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["runtime.xla"] not in ("auto", "off"),
        "runtime.logical_shards requires the same computation for each shard, and XLA fuses "
        "operations across shards",
        "set runtime.xla=off",
    ),
    Rule(
        lambda v: v["runtime.logical_shards"] and v["runtime.all_reduce.dtype"],
        "runtime.logical_shards keeps every bit of the gradients, and runtime.all_reduce.dtype "
        "rounds them",
        "set only one of the two",
    ),
    Rule(
        lambda v: v["runtime.all_reduce.dtype"] and v["runtime.precision"] == "float64",
        "runtime.all_reduce.dtype=bfloat16 would undo runtime.precision=float64",
        "set only one of the two",
    ),
)
