"""The options of a trainer that have a good default. Loads no TensorFlow."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from ctl import errors
from ctl.errors import UsageError

NON_FINITE = ("stop", "skip", "rollback", "ignore")


class _NoKey(UsageError, AttributeError):
    """A key that is not there; an AttributeError too, so that `getattr(section, key, 1)` works."""


class Section(Mapping[str, Any]):
    """A read-only section of a config, by attribute or by key, that knows which keys were read.

    A key that nobody reads has no effect, and `unread` finds it.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, name: str = ""):
        """Wraps a mapping; mappings inside become sections.

        Args:
            values: the keys and their values.
            name: what messages call the section, such as "model".
        """
        self._name = name
        self._values = {
            key: Section(value, f"{name}.{key}") if isinstance(value, Mapping) else value
            for key, value in (values or {}).items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            known = {name: f"{self._name}.{name}" for name in self._values}
            hint = errors.did_you_mean(str(key), known) or ": the section is empty"
            raise _NoKey(f"The config has no key {self._name}.{key}{hint}")
        self._read.add(key)
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or a default where there is none."""
        try:
            return self[key]
        except _NoKey:
            return default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Section({self._values})"

    def unread(self) -> list[str]:
        """The full names of the keys that were never read."""
        names = []
        for key, value in self._values.items():
            if isinstance(value, Section):
                names += value.unread()
            elif key not in self._read:
                names.append(f"{self._name}.{key}")
        return names


@dataclasses.dataclass(frozen=True)
class Clip:
    """How the reduced gradients are clipped; zero means not. At most one may be set.

    Attributes:
        global_norm: scale all gradients so that their joint norm is at most this (Pascanu et al.
            2013, as `tf.clip_by_global_norm`).
        norm: scale each gradient so that its norm is at most this.
        value: clip each element to [-value, value].
    """

    global_norm: float = 0.0
    norm: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        chosen = [name for name, bound in dataclasses.asdict(self).items() if bound]
        if len(chosen) > 1:
            raise UsageError(f"Clip by one rule, not by {' and '.join(chosen)}: set one of them.")
        for name, bound in dataclasses.asdict(self).items():
            if not 0.0 <= bound < float("inf"):
                raise UsageError(f"Clip {name} is {bound}, want a positive number, or 0 for none.")

    def __str__(self) -> str:
        for name, bound in dataclasses.asdict(self).items():
            if bound:
                return f"by {name.replace('_', ' ')} {bound:g}, after the reduction"
        return "none"


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """What a trainer does beside its model, data and optimizer.

        options = ctl.TrainerOptions(seed=1, gradient_accumulation_steps=4, model={"dropout": 0.1})

    Attributes:
        seed: initial weights, the order of the data and random layers are functions of it.
        precision: "float32", "float64", "bfloat16" or "float16".
        loss_scale: of float16: a fixed one, or 0 for a dynamic one.
        xla: what XLA compiles: "auto", "off", "loop", "step", "gradients" or "autocluster".
        placement: "stream", or "device" to hold the examples in the device's memory (xla="loop").
        logical_shards: if set, the gradient is the sum in a fixed order of so many shards': the same
            bits on any number of replicas that divides it, for so many times the reduction's bytes.
        all_reduce_dtype: "bfloat16" to halve the reduction's bytes; "" for as they are.
        gradient_accumulation_steps: micro-batches that a replica's rows are computed in.
        clip: how the reduced gradients are clipped.
        on_non_finite: what to do where a step's loss or gradients are not finite. "stop": end the
            training when the loop has ended, by a `NonFiniteStep`; "skip": leave the update out and go
            on; "rollback": end the loop likewise, and let `ctl.loop.controller.Controller` go back to
            the last checkpoint and on without that batch; "ignore": do not look.
        loss_spike: treat so, too, a step whose loss is more than so many times the median of the last
            101; 0 for none.
        norms: add the global norms of gradients, parameters and updates to a loop's outputs; it
            takes a copy of the variables for a moment in each step.
        prefetch: batches that the input pipeline prepares ahead; -1 lets tf.data choose.
        data: keys for `build_dataset` (`self.options.data.dir`).
        model: keys for `build_model` (`self.options.model.dropout`).
    """

    seed: int = 0
    precision: str = "float32"
    loss_scale: float = 0.0
    xla: str = "auto"
    placement: str = "stream"
    logical_shards: int = 0
    all_reduce_dtype: str = ""
    gradient_accumulation_steps: int = 1
    clip: Clip = Clip()
    on_non_finite: str = "stop"
    loss_spike: float = 0.0
    norms: bool = False
    prefetch: int = -1
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.gradient_accumulation_steps
        if count < 1:
            raise UsageError(f"gradient_accumulation_steps is {count}, want 1 or more.")
        if self.all_reduce_dtype not in ("", "bfloat16"):
            raise UsageError(
                f"all_reduce_dtype is {self.all_reduce_dtype!r}, want bfloat16, or ''."
            )
        modes = ("auto", "off", "loop", "step", "gradients", "autocluster")
        if self.xla not in modes:
            raise UsageError(f"xla is {self.xla!r}{errors.did_you_mean(self.xla, modes)}")
        if not 0.0 <= self.loss_scale < float("inf"):
            raise UsageError(f"loss_scale is {self.loss_scale}, want 0 or a positive number.")
        if self.on_non_finite not in NON_FINITE:
            hint = errors.did_you_mean(self.on_non_finite, NON_FINITE)
            raise UsageError(f"on_non_finite is {self.on_non_finite!r}{hint}")
        if self.loss_spike and not 1.0 < self.loss_spike < float("inf"):
            raise UsageError(f"loss_spike is {self.loss_spike}, want more than 1, or 0 for none.")
        if self.loss_spike and self.on_non_finite == "ignore":
            raise UsageError("loss_spike has no effect with on_non_finite=ignore: set it to 0.")
        if self.placement not in ("stream", "device"):
            raise UsageError(f"placement is {self.placement!r}, want stream or device.")
        if self.placement == "device" and self.xla != "loop":
            raise UsageError("placement=device needs xla=loop, which reads examples on the device.")
        if self.loss_scale and self.precision != "float16":
            raise UsageError("loss_scale has no effect without float16: leave it at 0.")
        for name in ("data", "model"):
            value = getattr(self, name)
            section = value if isinstance(value, Section) else Section(value, name)
            object.__setattr__(self, name, section)
