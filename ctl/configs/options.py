"""The options of a trainer, and the sections of a config that a trainer reads."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from operator import attrgetter
import re
from typing import Any

from ctl import errors
from ctl.configs.option_keys import OPTION_KEYS, check_rules, check_values
from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Clip:
    """The bounds of clipping as one argument: `clip=ctl.Clip(norm=1.0)` stands for `clip_norm=1.0`.

    Attributes:
        global_norm: the option `clip_global_norm`.
        norm: the option `clip_norm`.
        value: the option `clip_value`.
    """

    global_norm: float = 0.0
    norm: float = 0.0
    value: float = 0.0


class _MissingKeyError(UsageError, AttributeError):
    """A missing key; as an AttributeError it lets `getattr(section, key, default)` work."""


class Section(Mapping[str, Any]):
    """A read-only section of a config, accessed by attribute or key, that records which keys are read.

    A key that is never read has no effect; `unread` returns these keys.

    Args:
        values: keys and their values. Mappings among the values become sections, too.
        name: the name of the section in messages, such as "model".

    Raises:
        UsageError: a key has the name of a method, which the attribute would return instead.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, name: str = ""):
        for key in values or {}:
            if isinstance(key, str) and hasattr(Section, key):
                raise UsageError(
                    f"The config has the key {name}.{key}, but {key!r} is a method of a section: rename "
                    f"the key, for example to {name}.{key}_value."
                )
        self._name = name
        self._values = {
            key: Section(value, f"{name}.{key}") if isinstance(value, Mapping) else value
            for key, value in (values or {}).items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            known = {name: f"{self._name}.{name}" for name in self._values}
            hint = errors.did_you_mean(str(key), known) or ": the section is empty."
            raise _MissingKeyError(f"The config has no key {self._name}.{key}{hint}")
        self._read.add(key)
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or a default if the section does not have the key."""
        try:
            return self[key]
        except _MissingKeyError:
            return default

    def peek(self, key: str) -> Any:
        """Returns a value without recording that it was read; None without the key."""
        return self._values.get(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Section({self._values})"

    def unread(self) -> list[str]:
        """Returns the full names of the keys that were never read."""
        names = []
        for key, value in self._values.items():
            if isinstance(value, Section):
                names += value.unread()
            elif key not in self._read:
                names.append(f"{self._name}.{key}")
        return names


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    # Generated from the keys by docs/reference/generate.py. New fields follow the present ones.
    """The options of a trainer, in addition to its model, data and optimizer.

        options = ctl.TrainerOptions(seed=1, micro_batches=4, model={"dropout": 0.1})

    Attributes:
        seed: Determines the initial weights, the order of the data and the random layers.
        precision: Selects the dtype in which layers compute. With bfloat16 and float16, the variables
            stay in float32. With float64, they are in float64, too.
        loss_scale: With float16, fixes the loss scale at this value. With 0, it is dynamic.
        xla: Selects what XLA compiles: off, loop (many complete steps, on one replica or on GPUs), step
            (one complete step, as loop), gradients (the forward and backward pass), autocluster (the
            parts that TensorFlow selects), or auto, which chooses on GPUs the fastest of these that the
            strategy and the model support, and on CPUs off. The command ctl profile_input compares the
            modes.
        kernels: With auto, where XLA compiles the step for a GPU, attention in 16 bits is one kernel
            that stores no matrix of length x length (ctl explain shows which layers have it), and GELU
            in 16 bits and max pooling have gradients that store and read less. With off, TensorFlow
            computes all three.
        placement: With stream, the host sends every batch to the device. With device, the arrays are
            held in device memory and only indices are sent, which requires xla=loop.
        logical_shards: Compute the gradient as the sum of this many shards in a fixed order, which has
            the same bits on any number of replicas that divides it. The all-reduce then sends this many
            times the bytes. With 0, this is off.
        allow_unkeyed_random: Accept random operations that ctl cannot make a function of the seed, the
            step and the row, such as tf.random.uniform in a layer. The update then depends on how the
            batch is split, and on how often the run was resumed.
        allow_row_coupling: Accept losses in which a row depends on other rows of its replica or
            micro-batch, such as local negatives. The update then depends on how the batch is split.
        all_reduce_dtype: With bfloat16, the gradients are rounded and sent in half the bytes. With "",
            they are sent in their own dtype.
        compression: With float16 or bfloat16, the gradients are sent in 16 bits, and the rounding
            errors are added to the next ones. Updates are then no longer a function of the global batch
            alone. With "", this is off.
        micro_batches: Divide the batch of each replica into this many micro-batches, to save memory.
            The update does not depend on their number.
        shard_state: Split the optimizer's slot variables, which it keeps for each weight, over the
            replicas, to save memory. The updates have the same bits. With gradients, each replica also
            keeps only its part of the summed gradients, and norms are summed in another order.
        clip: A `ctl.Clip`, which sets the three bounds.
        loss_weights: Holds the factors of the losses that per_example_loss returns as a dict, by name,
            such as dict(digit=1.0, parity=0.3). The sum of the products is minimized, and each loss is
            also reported as NAME_loss.
        on_non_finite: Selects what happens after a step whose loss or gradients are not finite: stop
            (the run ends after the inner loop without saving), skip (the update is not applied),
            rollback (the run restores its last checkpoint and continues without that batch, at most 10
            times), or ignore (nothing is checked).
        loss_spike: Treat a step like one that is not finite (on_non_finite) if its loss is more than
            this many times the median of the last 101 losses. With 0, this is not checked.
        norms: With global, log the global norms of the gradients (before clipping), the parameters and
            the updates, and the shares of zero and non-finite elements of the gradients. With layers,
            also write (but do not print) the norms of each variable. Both hold a copy of the variables
            during each step. With "", none of them is logged.
        histogram_interval: Sets the steps between two histograms of the weights and of the gradients in
            TensorBoard. With 0, there are none.
        ema_decay: Evaluate and export the exponential moving average of the weights, with this decay,
            such as 0.999, after a warm-up. With 0, this is off.
        weight_decay_exclude: Names the variables without weight decay, as globs of names such as
            ["*/bias", "*/gamma", "*/beta"].
        optimizer_groups: Gives layers another learning rate or another optimizer, or freezes them,
            always or until a step. `variables` is a glob of names, or a list of them. The first group
            that matches a variable counts: [dict(variables="backbone/*", learning_rate_scale=0.1,
            frozen_until="1 epoch"), dict(variables="stem/*", frozen=True), dict(variables="head/*",
            optimizer=dict(name="adam", learning_rate=1e-3))]. In a script, the optimizer is a function
            that makes one.
        prefetch: Sets how many batches the input pipeline prepares ahead. With -1, tf.data chooses.
        cache: Keep parsed examples, before the augmentation: in memory, or in a folder, which several
            runs may share. With "", they are parsed again in each epoch.
        data: Holds what build_dataset reads as self.options.data: data.dir, and in a script any other
            key.
        model: Holds the experiment's own keys, which build_model reads as self.options.model.
        clip_global_norm: Scale all gradients of the global batch to at most this joint norm. With 0,
            this is off.
        clip_norm: Scale each gradient of the global batch to at most this norm. With 0, this is off.
        clip_value: Clip each element of the gradients of the global batch to [-value, value]. With 0,
            this is off.

    Raises:
        UsageError: an option has a value that is not allowed, or two options contradict each other.
    """

    seed: int = 0
    precision: str = "float32"
    loss_scale: float = 0.0
    xla: str = "auto"
    kernels: str = "auto"
    placement: str = "stream"
    logical_shards: int = 0
    allow_unkeyed_random: bool = False
    allow_row_coupling: bool = False
    all_reduce_dtype: str = ""
    compression: str = ""
    micro_batches: int = 1
    shard_state: bool | str = False
    clip: dataclasses.InitVar[Clip | None] = None
    loss_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    on_non_finite: str = "stop"
    loss_spike: float = 0.0
    norms: str = ""
    histogram_interval: int = 0
    ema_decay: float = 0.0
    weight_decay_exclude: Sequence[str] = ()
    optimizer_groups: Sequence[Mapping[str, Any]] = ()
    prefetch: int = -1
    cache: str = ""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip_global_norm: float = 0.0
    clip_norm: float = 0.0
    clip_value: float = 0.0
    # end

    @property
    def recompute(self) -> Any:
        """`model.recompute`, which the code of the model reads; None without the key."""
        assert isinstance(self.model, Section)
        return self.model.peek("recompute")

    @classmethod
    def from_config(cls, config: Any) -> "TrainerOptions":
        """Returns the options that a checked experiment config sets."""
        return cls(
            **{option: attrgetter(key)(config) for option, key in OPTION_KEYS.items()},
            loss_weights=config.loss_weights.to_dict(),
            data=Section({"dir": config.data.dir}, "data"),
            model=Section(config.model.to_dict(), "model"),
        )

    def by_key(self) -> dict[str, Any]:
        """Returns the options by the full names of their keys, without those that are sections."""
        return {key: getattr(self, option) for option, key in OPTION_KEYS.items()}

    def __post_init__(self, clip: Clip | None) -> None:
        if clip is not None:
            self._set_clip(clip)
        values = self.by_key()
        try:
            check_values(values)
            check_rules(values)
        except UsageError as error:  # the checks know the keys alone
            raise UsageError(name_options(str(error))) from None
        for name, factor in self.loss_weights.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                raise UsageError(f"loss_weights.{name} is {factor!r}, but must be a number.")
        for name in ("weight_decay_exclude", "optimizer_groups"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("data", "model"):
            value = getattr(self, name)
            section = value if isinstance(value, Section) else Section(value, name)
            object.__setattr__(self, name, section)

    def _set_clip(self, clip: Clip) -> None:
        if not isinstance(clip, Clip):
            raise UsageError(f"clip is {clip!r}, but must be a ctl.Clip, as ctl.Clip(norm=1.0).")
        for name, bound in vars(clip).items():
            if getattr(self, f"clip_{name}") not in (0, bound):
                raise UsageError(f"clip and clip_{name} are set: set only one of them.")
            object.__setattr__(self, f"clip_{name}", bound)


def name_options(text: str) -> str:
    """Returns a text with the names of options in place of their config keys."""
    options = {key: option for option, key in OPTION_KEYS.items()}
    pattern = rf"\b({'|'.join(map(re.escape, options))})\b"
    return re.sub(pattern, lambda match: options[match[0]], text)
