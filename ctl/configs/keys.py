"""The keys of an experiment's config: default, meaning, allowed values, and what they set.

A new key is a row of `KEYS`. If the step reads it, its `option` is a new field of `TrainerOptions`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

from ml_collections import config_dict

from ctl import optimizers
from ctl.errors import UsageError, did_you_mean
from ctl.hardware import strategies
from ctl.optimizers import schedules

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
XLA_MODES = ("auto", "off", "loop", "step", "gradients", "autocluster")
ON_NON_FINITE = ("stop", "skip", "rollback", "ignore")
MAX_DIGITS = 99  # in an integer; Python refuses to print integers of thousands of digits
_MOST = 2**31 - 1  # TensorFlow holds these numbers as int32
_TYPE_NAMES = {bool: "boolean", float: "number", int: "integer", list: "list", str: "string"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of an experiment's config, or a section of keys.

    Attributes:
        name: its full name, such as "train.steps".
        default: its default; {} for a section.
        text: what it means.
        choices: the allowed values; empty for any of the default's type.
        least: the smallest number that is allowed; None for no bound.
        most: the largest integer that is allowed if `least` is set.
        bound: another condition: whether a value is allowed, and what the message requires.
        duration: whether the key is a number of steps that may be a text such as "90 epochs".
        time: whether the text may also be a time, such as "30 minutes".
        option: the field of `TrainerOptions` that the key sets; "" for none.
        harmless: whether a run that is resumed may change the key, or the keys of the section, without
            --allow_config_change. These are keys of the hardware, of the number of micro-batches, of
            what only observes, and of when a run stops or skips.
        free: whether the experiment chooses the keys of the section: those of its own model, arguments
            of functions, and names of its models.
    """

    name: str
    default: Any
    text: str = ""
    choices: Sequence[str] = ()
    least: int | None = None
    most: int = _MOST
    bound: tuple[Callable[[Any], bool], str] | None = None
    duration: bool = False
    time: bool = False
    option: str = ""
    harmless: bool = False
    free: bool = False

    @property
    def is_section(self) -> bool:
        """Whether this is a section with keys of ctl."""
        return self.default == {} and not self.free

    @property
    def type(self) -> str:
        """boolean, integer, number, string, list, duration or free section."""
        if self.free:
            return "free section"
        return "duration" if self.duration else _TYPE_NAMES[type(self.default)]

    def check(self, value: Any) -> None:
        """Raises UsageError if a value of the default's type is not allowed; the message is one line."""
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.name} is {value!r}{did_you_mean(str(value), self.choices)}")
        if self.least is not None and isinstance(self.default, float):
            if not self.least <= value < math.inf:
                raise UsageError(
                    f"{self.name} is {value}, but must be a finite number, at least {self.least}."
                )
        elif self.least is not None and not isinstance(value, str):  # a duration is a text
            self._check_integer(value, self.least)
        if self.bound and not self.bound[0](value):
            raise UsageError(f"{self.name} is {value}, but must be {self.bound[1]}.")

    def _check_integer(self, value: int, least: int) -> None:
        if not least <= value <= self.most:
            limit = f"at least {least}" if value < least else f"at most {self.most}"
            raise UsageError(f"{self.name} is {format_integer(value)}, but must be {limit}.")


def format_integer(number: int) -> str:
    """Returns the digits of an integer, or their number if they are too many to print."""
    if abs(number) < 10**MAX_DIGITS:
        return str(number)
    return f"a number of {int(math.log10(abs(number))) + 1} digits"


# fmt: off
KEYS = (
    Key("trainer", "",
        text="The class to train, a subclass of ctl.StandardTrainer: path/to/file.py:Class (relative "
             "to the folder of the config file, or else to the current folder) or "
             "package.module:Class."),
    Key("seed", 0, least=0, most=2**32 - 1, option="seed",
        text="Determines the initial weights, the order of the data and the random layers."),
    Key("init", {}),
    Key("init.checkpoint", "",
        text="Start from the weights of another run: its workdir, its folder of checkpoints (the "
             "newest is used), or one checkpoint, such as runs/a/checkpoints/ckpt-500; or a file of "
             "weights of another library: .safetensors, .h5, .keras or .npz. Each may be a URL. "
             '"": random initial weights.'),
    Key("init.variables", [],
        text='The variables to restore, as patterns of names such as ["conv*/*", "dense/kernel"]; '
             'empty: all. A pattern such as "!head/*" leaves variables out.'),
    Key("init.names", {}, free=True,
        text="With a file of weights: the names in it, by patterns of the model's names, such as "
             '{"*/kernel": "*.weight"}; the texts that each * stands for are inserted. By default the '
             "names are those of the model. --mode=explain lists them."),
    Key("init.layout", "", choices=("", "torch"),
        text="With a file of weights: torch if its kernels are [outputs, inputs, ...]."),
    Key("init.averages", False,
        text="Load the averages of the weights of these runs (optimizer.ema_decay) instead of the "
             "weights."),
    Key("init.models", {}, free=True,
        text="The same for further models of the trainer, by attribute: "
             'init=dict(models=dict(teacher="runs/a")) starts self.teacher from the weights of that '
             "run's model."),
    Key("runtime", {}),
    Key("runtime.strategy", "auto", choices=strategies.NAMES, harmless=True,
        text=f"{', '.join(strategies.NAMES)}; see docs/hardware.md."),
    Key("runtime.devices", [], harmless=True,
        text='The devices to use, such as ["GPU:0", "GPU:2"]; empty: all (one_device: the first).'),
    Key("runtime.logical_devices", 0, least=0, harmless=True,
        text="Split the first GPU, or the CPU if there is no GPU, into this many devices; 0: do not "
             "split."),
    Key("runtime.tpu", "", harmless=True,
        text="With the strategy tpu or auto: the name of a Google Cloud TPU in the project and zone "
             "of this machine, projects/PROJECT/locations/ZONE/nodes/NAME, or the address of a worker "
             'of the TPU, grpc://HOST:PORT; "": the TPU of this machine.'),
    Key("runtime.precision", "float32", choices=PRECISIONS, option="precision",
        text="float32, float64, or mixed precision with bfloat16 or float16 layers and float32 "
             "variables."),
    Key("runtime.loss_scale", 0.0, least=0, option="loss_scale",
        text="With float16: a fixed loss scale; 0: a dynamic one."),
    Key("runtime.xla", "auto", choices=XLA_MODES, option="xla", harmless=True,
        text="What XLA compiles: off, loop (many complete steps; one replica), step (one complete "
             "step; one replica), gradients (the forward and backward pass), autocluster (the parts "
             "that TensorFlow selects), auto (on GPUs the fastest of these that the strategy and the "
             "model support; on CPUs off: ctl profile_input compares the modes)."),
    Key("runtime.fused_attention", "auto", choices=("auto", "off"), option="fused_attention",
        harmless=True,
        text="auto: where XLA compiles the step for a GPU, attention in 16 bits is one kernel that "
             "stores no matrix of length x length (ctl explain shows which layers have it); off: "
             "the formula."),
    Key("runtime.logical_shards", 0, least=0, option="logical_shards",
        text="Compute the gradient as the sum of this many shards in a fixed order: the same bits on "
             "any number of replicas that divides it. The all-reduce transfers this many times the "
             "bytes. 0: off."),
    Key("runtime.all_reduce", {}),
    Key("runtime.all_reduce.dtype", "", choices=("", "bfloat16"), option="all_reduce_dtype",
        text="bfloat16 halves the bytes of the all-reduce; \"\": the gradients' dtype."),
    Key("runtime.all_reduce.compression", "", choices=("", "float16", "bfloat16"),
        option="compression",
        text="float16 or bfloat16: send the gradients in 16 bits, and add the rounding errors to the "
             'next ones; "": off. Updates are then no longer a function of the global batch alone. '
             "See docs/step.md."),
    Key("runtime.all_reduce.algorithm", "auto", choices=strategies.ALGORITHMS, harmless=True,
        text="auto, nccl (GPUs), hierarchical_copy (GPUs of one machine), one_device, ring (several "
             "processes)."),
    Key("runtime.all_reduce.bucket_mib", 0.0, least=0, harmless=True,
        text="With several processes: reduce the gradients in groups of about this many MiB, each as "
             "soon as the backward pass has computed it; 0: one group after the backward pass. See "
             "docs/hardware.md."),
    Key("runtime.all_reduce.timeout", 0.0, least=0, harmless=True,
        text="Seconds that a process waits for the others in one; 0: no limit."),
    Key("runtime.cluster", {}, harmless=True, text="Of several processes (TF_CONFIG)."),
    Key("runtime.cluster.start_timeout", 600.0, least=0,
        text="Seconds to wait until all processes have started."),
    Key("runtime.cluster.heartbeat_timeout", 30.0, least=0,
        bound=(lambda seconds: seconds >= 1, "at least 1"),
        text="Seconds until an unreachable process counts as lost."),
    Key("runtime.cluster.shard_mib", 0.0, least=0,
        text="Split variables into shards of at least this many MiB, at most one per parameter "
             "server; 0: do not split."),
    Key("runtime.deterministic", False, harmless=True,
        text="TensorFlow's op determinism: the same bits in every run on GPUs too, but slower."),
    Key("runtime.allow_unkeyed_random", False, option="allow_unkeyed_random", harmless=True,
        text="Accept random operations that ctl cannot key by row, such as tf.random.uniform in a "
             "layer: the update then depends on how the batch is split, and on how often the run was "
             "resumed."),
    Key("runtime.allow_row_coupling", False, option="allow_row_coupling", harmless=True,
        text="Accept losses in which a row depends on other rows of its replica or micro-batch, such "
             "as local negatives: the update then depends on how the batch is split."),
    Key("data", {}),
    Key("data.dir", "",
        text="The folder of the dataset, which build_dataset reads as self.options.data.dir. A "
             "relative path is searched in the current folder, then in that of the config file."),
    Key("data.global_batch_size", 0, least=0,
        text="The number of examples per update. Set either this key or data.per_replica_batch_size."),
    Key("data.per_replica_batch_size", 0, least=0,
        text="The number of examples per update and replica."),
    Key("data.placement", "stream", choices=("stream", "device"), option="placement", harmless=True,
        text="stream, or device: hold the arrays in device memory and transfer only indices "
             "(xla=loop)."),
    Key("data.prefetch", -1, least=-1, option="prefetch", harmless=True,
        text="Batches that the input pipeline prepares ahead; -1: tf.data chooses."),
    Key("data.cache", "",
        bound=(lambda place: place.lower() not in ("none", "off", "false", "true", "disk"),
               "memory, a folder, or '' for no cache"),
        option="cache", harmless=True,
        text="Keep parsed examples, before the augmentation: memory, or a folder, which several runs "
             'may share; "": parse them again in each epoch. See docs/data.md.'),
    Key("model", {}, free=True,
        text="The experiment's own keys, which build_model reads as self.options.model."),
    Key("loss_weights", {}, free=True,
        text="The factors of the losses that per_example_loss returns as a dict, by name, such as "
             "dict(digit=1.0, parity=0.3); the sum of the products is minimized. Each loss is also "
             "reported as NAME_loss."),
    Key("optimizer", {}),
    Key("optimizer.name", "adam",
        text=f"{', '.join(optimizers.CLASSES)}, or package.module:function; see docs/optimizers.md."),
    Key("optimizer.arguments", {}, free=True,
        text="Further arguments of the optimizer's class, such as beta_2 or epsilon."),
    Key("optimizer.learning_rate", 0.001, least=0, bound=(lambda rate: rate > 0, "greater than 0"),
        text="The highest rate, which the schedule multiplies."),
    Key("optimizer.learning_rate_batch_size", 0, least=0,
        text="If not 0, learning_rate is for this global batch size and is scaled linearly with the "
             'actual one (Goyal et al. 2017, "Accurate, large minibatch SGD").'),
    Key("optimizer.schedule", "constant",
        text=f"{', '.join(schedules.KINDS)}, or package.module:function."),
    Key("optimizer.schedule_arguments", {}, free=True,
        text="Arguments of the schedule, such as end_factor: the last rate as a fraction of "
             "learning_rate."),
    Key("optimizer.warmup_steps", 0, least=0, duration=True,
        text="Updates of linear warm-up from 0 before the schedule."),
    Key("optimizer.decay_steps", 0, least=0, duration=True,
        text="Updates of the decay after the warm-up; 0: up to train.steps."),
    Key("optimizer.momentum", 0.0, least=0,
        bound=(lambda momentum: momentum < 1, "less than 1, such as 0.9"),
        text=f"The momentum of {', '.join(optimizers.MOMENTUM)}."),
    Key("optimizer.weight_decay", 0.0, least=0,
        text="decoupled, as the argument of tf_keras optimizers."),
    Key("optimizer.weight_decay_exclude", [], option="weight_decay_exclude",
        text='Variables without weight decay, as patterns of names such as ["*/bias", "*/gamma", '
             '"*/beta"].'),
    Key("optimizer.groups", [], option="optimizer_groups",
        text="Layers with another learning rate or optimizer, or without updates until a step or at "
             'all, the first match counts: [dict(variables="backbone/*", learning_rate_scale=0.1, '
             'frozen_until="1 epoch"), dict(variables="stem/*", frozen=True), dict(variables="head/*", '
             'optimizer=dict(name="adam", learning_rate=1e-3))].'),
    Key("optimizer.ema_decay", 0.0, least=0,
        bound=(lambda decay: decay < 1, "less than 1, such as 0.999"), option="ema_decay",
        text="Evaluate and export the exponential moving average of the weights, with this decay, "
             "such as 0.999, after a warm-up; 0: off. See docs/optimizers.md."),
    Key("optimizer.shard_state", False, option="shard_state", harmless=True,
        text="Split the optimizer's slot variables over the replicas, with the same bits; see "
             "docs/memory.md."),
    Key("optimizer.micro_batches", 1, least=1, option="micro_batches", harmless=True,
        text="The number of micro-batches that a per-replica batch is divided into, to save memory; the "
             "update does not depend on it."),
    Key("optimizer.clip", {}, text="Of the reduced gradients; set at most one."),
    Key("optimizer.clip.global_norm", 0.0, least=0,
        text="Scale all gradients to at most this joint norm."),
    Key("optimizer.clip.norm", 0.0, least=0, text="Scale each gradient to at most this norm."),
    Key("optimizer.clip.value", 0.0, least=0, text="Clip each element to [-value, value]."),
    Key("train", {}, harmless=True),
    Key("train.steps", 1000, least=1, duration=True,
        text='The total number of steps (global batches), or a duration: "90 epochs", "5000000 '
             'examples". The other keys that accept a duration are listed in docs/running.md; '
             'checkpoint_interval, summary_interval and eval.interval also accept a time, such as "30 '
             'minutes".'),
    Key("train.max_duration", "",
        text='End training earlier, after a time such as "8 hours"; "": no limit.'),
    Key("train.steps_per_loop", 100, least=1, duration=True,
        text="Steps of an inner loop, after which the host logs and may save."),
    Key("train.on_non_finite", "stop", choices=ON_NON_FINITE, option="on_non_finite",
        text="After a step whose loss or gradients are not finite: stop (the run ends after the inner "
             "loop without saving), skip (the update is not applied), rollback (the run restores its "
             "last checkpoint and continues without that batch, at most 10 times), ignore (no "
             "check)."),
    Key("train.loss_spike", 0.0, least=0,
        option="loss_spike", bound=(lambda factor: factor == 0 or factor > 1,
                                    "greater than 1, such as 3.0, or 0 for no limit"),
        text="Treat a loss of more than this many times the median of the last 101 losses in the same "
             "way; 0: do not check."),
    Key("train.norms", "", choices=("", "global", "layers"), option="norms",
        text="global: log the global norms of the gradients (before clipping), the parameters and the "
             "updates, and the shares of zero and non-finite elements of the gradients; layers: also "
             'write (but do not print) the norms of each variable; "": off.'),
    Key("train.best", {},
        text="Keep the checkpoints of the best evaluations in best/, apart from the others."),
    Key("train.best.metric", "", text='Such as eval/accuracy; "": off.'),
    Key("train.best.mode", "", choices=("", "max", "min"),
        text="max if higher values of the metric are better, min if lower ones are."),
    Key("train.best.keep", 1, least=1, text="The number of checkpoints."),
    Key("train.best.patience", 0, least=0,
        text="End training after this many evaluations in a row that were not better than the best "
             "one; 0: do not end it early."),
    Key("train.best.restore", False, text="The run's result is the best checkpoint, not the last step."),
    Key("train.export", "", choices=("", "best", "last"),
        text='Export the "best" or the "last" checkpoint to export/ at the end, with the averaged '
             'weights if optimizer.ema_decay is set; "": do not.'),
    Key("train.profile", "",
        text='The steps to profile, as FIRST:END without END, such as "200:210"; "": none. A SIGUSR1 '
             "profiles the next inner loop."),
    Key("train.summary_interval", 0, least=0, duration=True, time=True,
        text="Steps between two writes of the trainer's own tf.summary calls in a step; 0: "
             "steps_per_loop."),
    Key("train.checkpoint_interval", 1000, least=0, duration=True, time=True,
        text="Steps between two checkpoints; 0: save only at the end."),
    Key("train.checkpoints_to_keep", 3, least=1, text="The newest ones."),
    Key("train.checkpoint_keep_every", 0, least=0, duration=True,
        text="Also keep those of its multiples; 0: none."),
    Key("train.checkpoint_writing", "auto", choices=("auto", "background", "blocking"),
        text="background: copy the values and continue while a thread writes them (one process only); "
             "blocking: wait until they are written; auto: background if possible."),
    Key("train.local_dir", "",
        text="With a --workdir such as gs://bucket/run: the local folder that the run works in; \"\": a "
             "folder in the user's cache. See docs/storage.md."),
    Key("train.upload_grace", 600.0, least=0,
        text="With such a --workdir: seconds that the end of a run, also after SIGTERM, waits until "
             "everything is in the bucket."),
    Key("train.preemption_notice", "none", choices=("none", "gce"),
        text="gce: also ask Google Cloud whether this machine will be preempted; none: only react to "
             "SIGTERM."),
    Key("summaries", {}, harmless=True, text="See docs/observing.md."),
    Key("summaries.writers", ["tensorboard", "jsonl"],
        text="Where the logged values go: tensorboard, jsonl (metrics.jsonl), mlflow, wandb, or "
             "path/to/file.py:Class or package.module:Class."),
    Key("summaries.histogram_interval", 0, least=0, option="histogram_interval",
        text="Steps between two histograms of the weights and of the gradients in TensorBoard; 0: "
             "none."),
    Key("actions", [], harmless=True,
        text="Actions at the end of inner loops and evaluations, each a name or a dict(name=..., "
             "**arguments): path/to/file.py:Class or package.module:Class; see docs/actions.md."),
    Key("eval", {}, harmless=True),
    Key("eval.interval", 0, least=0, duration=True, time=True,
        text="Steps between evaluations; 0: evaluate only at the end."),
    Key("eval.global_batch_size", 0, least=0,
        text="Examples per batch; 0: the global batch size of training."),
    Key("eval.splits", ["eval"],
        text="The splits that build_dataset is asked for; [] for an experiment without evaluation "
             "data. The metrics of several splits have names such as eval/test/accuracy. ctl.data.idx "
             'has only the splits "train" and "eval".'),
    Key("eval.before_training", False, text="Also evaluate at step 0."),
)
# fmt: on
BY_NAME = {key.name: key for key in KEYS}
FREE_SECTIONS = tuple(key.name for key in KEYS if key.free)
# Former name of a key -> its name. A run that was saved with the former name can be resumed.
RENAMED = {"optimizer.gradient_accumulation_steps": "optimizer.micro_batches"}
# Former key -> what to do instead. A run that was saved with it can be resumed if it had no effect: its
# value was 0, false or empty.
REMOVED = {
    "data.overfit_batches": "run ctl check CONFIG --checks=overfit",
    "runtime.all_reduce.rank": "set runtime.all_reduce.compression=float16 in place of PowerSGD",
    "runtime.all_reduce.compression_start": "compression is on from the first step, or off",
}
# Option of a trainer -> the config key that sets it.
OPTION_KEYS = {key.option: key.name for key in KEYS if key.option}


def defaults() -> config_dict.ConfigDict:
    """Returns an unlocked config with every key at its default."""
    config = config_dict.ConfigDict()
    for key in KEYS:
        *path, last = key.name.split(".")
        section = functools.reduce(getattr, path, config)
        if key.default == {}:
            section[last] = config_dict.ConfigDict()
        elif key.duration:
            # Of any type, because ConfigDict rejects a string where the default is an integer.
            section[last] = config_dict.FieldReference(key.default, field_type=object)
        else:
            section[last] = list(key.default) if isinstance(key.default, list) else key.default
    return config


def is_harmless(name: str) -> bool:
    """Returns whether a run that is resumed may change a key, by its mark or that of a section of it."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return any(BY_NAME[each].harmless for each in names if each in BY_NAME)
