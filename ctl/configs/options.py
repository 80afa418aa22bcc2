"""The options of a trainer, and the sections of a config that a trainer reads."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import re
from typing import Any

from ctl import errors
from ctl.configs.keys import OPTION_KEYS, check_rules, check_values, flatten
from ctl.errors import UsageError

CLIP_KEYS = {f"clip.{name}": f"optimizer.clip.{name}" for name in ("global_norm", "norm", "value")}


@contextlib.contextmanager
def _named_by_options(keys: Mapping[str, str]) -> Iterator[None]:
    """Replaces config keys by the names of their options in the message of a UsageError.

    Args:
        keys: option -> config key.
    """
    try:
        yield
    except UsageError as error:
        options = {key: option for option, key in keys.items()}
        pattern = "|".join(map(re.escape, options))
        message = re.sub(pattern, lambda match: options[match[0]], str(error))
        raise UsageError(message) from None


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds to which the reduced gradients are clipped. At most one may be set; 0 means no bound.

    Attributes:
        global_norm: scales all gradients so that their joint norm is at most this (Pascanu et al.
            2013, as `tf.clip_by_global_norm`).
        norm: scales each gradient so that its norm is at most this.
        value: clips each element to [-value, value].
    """

    global_norm: float = 0.0
    norm: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        values = {
            f"optimizer.clip.{name}": bound for name, bound in dataclasses.asdict(self).items()
        }
        with _named_by_options(CLIP_KEYS):
            check_values(values)
            check_rules(values)

    def __str__(self) -> str:
        for name, bound in dataclasses.asdict(self).items():
            if bound:
                return f"by {name.replace('_', ' ')} {bound:g}, after the reduction"
        return "none"


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
    """The options of a trainer, in addition to its model, data and optimizer.

        options = ctl.TrainerOptions(seed=1, micro_batches=4, model={"dropout": 0.1})

    Attributes:
        seed: determines the initial weights, the order of the data and the random layers.
        precision: "float32", "float64", "bfloat16" or "float16".
        loss_scale: a fixed loss scale for float16; 0 for a dynamic one.
        xla: what XLA compiles: "auto", "off", "loop", "step", "gradients" or "autocluster".
        kernels: "auto" to compute attention, GELU and max pooling by ctl's kernels where XLA compiles
            for a GPU, or "off" to leave all three to TensorFlow.
        placement: "stream", or "device" to hold the examples in device memory (xla="loop").
        logical_shards: if not 0, the gradient is the sum of this many shards in a fixed order, which
            gives the same bits on any number of replicas that divides it. The all-reduce transfers
            this many times the bytes.
        allow_unkeyed_random: accept random operations that ctl cannot key by row, such as
            tf.random.uniform: the update then depends on how the batch is split.
        allow_row_coupling: accept losses in which a row depends on other rows of its replica or
            micro-batch, such as local negatives: the update then depends on how the batch is split.
        all_reduce_dtype: "bfloat16" to halve the bytes of the all-reduce; "" to keep the dtype of the
            gradients.
        compression: "float16" or "bfloat16" to send the gradients in 16 bits, and to add the rounding
            errors to the next gradients; "" for their own dtype.
        micro_batches: the number of micro-batches that a per-replica batch is divided into.
        shard_state: split the optimizer's slot variables over the replicas; "gradients" splits the
            gradients, too.
        clip: how the reduced gradients are clipped.
        ema_decay: the decay of the exponential moving average of the weights, which evaluations use;
            0 for none.
        weight_decay_exclude: patterns of the names of variables that have no weight decay.
        optimizer_groups: dicts with `variables`, which is a pattern of names or a list of them, and
            either `frozen`, or one or more of `learning_rate_scale`, `frozen_until`, which is a step or
            a text such as "2 epochs", and `optimizer`, which is a function that makes another
            optimizer for these variables. The first group that matches counts.
        loss_weights: name -> factor of each loss that `per_example_loss` returns, if it returns a dict.
        on_non_finite: what happens after a step whose loss or gradients are not finite. "stop": raise
            `NonFiniteStep` at the end of the inner loop; "skip": do not apply the update, and
            continue; "rollback": as "stop", and the run restores the last checkpoint and continues
            without that batch; "ignore": do not check.
        loss_spike: if not 0, a loss that is more than this many times the median of the last 101
            losses is treated like one that is not finite.
        norms: "global" adds the global norms of gradients, parameters and updates to the outputs of a
            loop, and the shares of zero and of non-finite elements of the gradients; "layers" also
            adds the norms of each variable, under "layers". Both hold a copy of the variables during
            each step. "": none.
        histogram_interval: steps between two histograms of the gradients; 0 for none.
        prefetch: the number of batches that the input pipeline prepares ahead; -1 lets tf.data choose.
        cache: where parsed examples are kept: "memory", a folder, or "" for nowhere.
        data: keys for `build_dataset` (`self.options.data.dir`).
        model: keys for `build_model` (`self.options.model.dropout`).

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
    clip: Clip = Clip()
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

    @property
    def recompute(self) -> Any:
        """`model.recompute`, which the code of the model reads; None without the key."""
        assert isinstance(self.model, Section)
        return self.model.peek("recompute")

    @classmethod
    def from_config(cls, config: Any) -> "TrainerOptions":
        """Returns the options that a checked experiment config sets."""
        values = flatten(config)
        return cls(
            **{option: values[key] for option, key in OPTION_KEYS.items()},
            clip=Clip(**config.optimizer.clip.to_dict()),
            loss_weights=config.loss_weights.to_dict(),
            data=Section({"dir": config.data.dir}, "data"),
            model=Section(config.model.to_dict(), "model"),
        )

    def by_key(self) -> dict[str, Any]:
        """Returns the options by the full names of the config keys that set them."""
        values = {key: getattr(self, option) for option, key in OPTION_KEYS.items()}
        return values | {
            key: getattr(self.clip, key.rpartition(".")[-1]) for key in CLIP_KEYS.values()
        }

    def __post_init__(self) -> None:
        if not isinstance(self.clip, Clip):
            raise UsageError(
                f"clip is {self.clip!r}, but must be a ctl.Clip, as ctl.Clip(norm=1.0)."
            )
        values = self.by_key()
        # The checks know the keys alone: the message of a script names the option.
        with _named_by_options(OPTION_KEYS | CLIP_KEYS):
            check_values(values)
            check_rules(values)
        for name, factor in self.loss_weights.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                raise UsageError(f"loss_weights.{name} is {factor!r}, but must be a number.")
        for name in ("weight_decay_exclude", "optimizer_groups"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("data", "model"):
            value = getattr(self, name)
            section = value if isinstance(value, Section) else Section(value, name)
            object.__setattr__(self, name, section)
