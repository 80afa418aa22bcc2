"""Calls a callback of Keras in a run, as an action."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.keras import models
from ctl.keras.precision import Optimizer
from ctl.loop.actions.action import Action

if TYPE_CHECKING:
    from ctl.evaluator import StandardEvaluator
    from ctl.loop.controller import Controller

_HOOKS = ("set_model", "set_params", "on_train_begin", "on_epoch_end", "on_train_end")
_RATE = "set optimizer.schedule, or the learning_rate of a ctl.Run between calls of train"
# The class, or an argument, of callbacks that change what is trained -> what to use instead.
_REFUSED = {
    "BackupAndRestore": "a run of ctl resumes by itself: remove it",
    "LearningRateScheduler": _RATE,
    "ReduceLROnPlateau": "set optimizer.schedule=plateau, with metric, mode, patience and factor in "
    "optimizer.schedule_arguments",
    "SwapEMAWeights": "set optimizer.ema_decay",
    "restore_best_weights": "set train.best.restore=True, with train.best.metric and train.best.mode",
}


class KerasCallback(Action):
    """Calls a callback of tf_keras or Keras 3.

        class Print(tf_keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs):
                print(epoch, logs["loss"], logs["val_accuracy"])

        run = ctl.Run("my_model.py", actions=[ctl.KerasCallback(Print())])

    An inner loop is a batch of the callback: `on_train_batch_end(step, logs)` gets the last step of the
    loop, and its mean loss and metrics. An evaluation ends an epoch: `on_epoch_end(epoch, logs)` gets
    the numbers of the last loop, and those of the evaluation as "val_loss" ("val_SPLIT_loss" of several
    splits). A run without an evaluation ends an epoch after each loop. `on_test_end` is called after
    each evaluation, `on_train_begin` and `on_train_end` once per process, or per call of
    `ctl.Run.train`. `self.model.stop_training = True` ends the run after the action.

    The callback runs in the chief only, unless `ctl.as_action` gets `everywhere=True`. A checkpoint
    holds the number of the epoch, and no other state of the callback.

    Args:
        callback: an object with the methods of `tf_keras.callbacks.Callback`.

    Raises:
        UsageError: it is no callback, or it changes weights or the learning rate, which the
            checkpoints of a run would not reproduce. The run ends without saving what it changed.
    """

    def __init__(self, callback: Any):
        name = type(callback).__name__
        if isinstance(callback, type) or not all(hasattr(callback, hook) for hook in _HOOKS):
            raise UsageError(
                f"ctl.KerasCallback got {callback!r}, but requires an instance of a Keras callback."
            )
        for refused, fix in _REFUSED.items():
            is_class = refused in (cls.__name__ for cls in type(callback).__mro__)
            if is_class or getattr(callback, refused, False) is True:
                raise UsageError(f"{name} ({refused}) changes what is trained: {fix}.")
        self._callback, self._name = callback, name
        self._epoch = 0
        self._is_open = False  # whether the epoch has a loop, and no evaluation yet
        self._trains = self._in_training = self._in_epoch = False  # of this process

    def check(self, evaluator: "StandardEvaluator | None") -> None:
        """Chooses where an epoch ends."""
        if evaluator is None:
            self.at = "train"

    def begin(self, controller: "Controller") -> None:
        """Hands the model to the callback."""
        super().begin(controller)
        trainer = controller.trainer
        self._model = _Model(getattr(trainer, "model", None), getattr(trainer, "optimizer", None))
        self._callback.set_model(self._model)
        self._callback.set_params({"verbose": 0, "epochs": None, "steps": None})

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Ends an epoch, if the run trains."""
        ends = self._trains and self._is_open
        if ends:  # a resumed run may begin with the evaluation of its checkpoint
            self._begin()
        logs = dict(_flat(self.controller.outputs))
        if self.at == "eval":
            numbers = dict(_flat(outputs))
            logs |= {f"val_{name}": value for name, value in numbers.items()}
            self._call("on_test_end", numbers)
        if ends:
            self._is_open = self._in_epoch = False
            self._epoch += 1
            self._call("on_epoch_end", self._epoch - 1, logs)

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Calls `on_train_end`, if an inner loop has begun the training."""
        self._trains = True
        try:
            yield
        finally:
            self._trains = False
        if self._in_training:
            self._in_training = self._in_epoch = False
            self._call("on_train_end", dict(_flat(self.controller.outputs)))

    @contextlib.contextmanager
    def around(self, first: int, end: int) -> Iterator[None]:
        """Calls the callback before and after an inner loop."""
        self._is_open = True
        self._begin()
        self._call("on_train_batch_begin", first, {})
        yield
        self._call("on_train_batch_end", end - 1, dict(_flat(self.controller.outputs)))

    def get_state(self) -> dict[str, Any]:
        """Returns the number of epochs."""
        return {"epoch": self._epoch, "is_open": self._is_open}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the number of epochs."""
        self._epoch, self._is_open = state["epoch"], state["is_open"]

    def _begin(self) -> None:
        """Begins the training and the epoch, unless they have begun in this process."""
        if not self._in_training:
            self._in_training = True
            self._call("on_train_begin", {})
        if not self._in_epoch:
            self._in_epoch = True
            self._call("on_epoch_begin", self._epoch, {})

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a method of the callback, and refuses changes of what is trained."""
        method = getattr(self._callback, hook, None)
        # The methods of Keras' base class do nothing, so that reading the weights would be in vain.
        runs = self.everywhere or self.controller.is_chief
        if method is None or not runs or _is_default(self._callback, hook):
            return
        before = self._checksum()
        method(*arguments)
        if self._checksum() != before:
            raise UsageError(
                f"{self._name}.{hook} changes weights or the learning rate, which a resumed run would "
                "not repeat: make them variables that the trainer's step assigns, or remove it."
            )
        if self._model.stop_training:
            self.request_stop(f"{self._name} has set model.stop_training")

    def _checksum(self) -> bytes:
        """Returns sums of the variables of the model, and of its optimizer."""
        model, optimizer = self._model._wrapped, self._model.optimizer
        variables = list(getattr(model, "variables", ()))
        if optimizer is not None:
            own = optimizer.variables
            variables += own() if callable(own) else own
            variables.append(getattr(optimizer, "_learning_rate", None))
        sums = []
        for variable in models.raw(v for v in variables if hasattr(v, "assign")):
            # The copy of this process: the mean of all copies is a collective operation.
            value = tf.convert_to_tensor(getattr(variable, "values", (variable,))[0])
            if value.dtype.is_floating or value.dtype.is_integer:
                value = tf.reshape(tf.cast(value, tf.float64), [-1])
                sums += [tf.reduce_sum(value), tf.reduce_sum(value * value)]
        return np.asarray(sums).tobytes()


class _Model:
    """The model as a callback sees it; what a callback sets does not change the model itself."""

    def __init__(self, model: Any, optimizer: Optimizer):
        self._wrapped = models.inner(model)
        self.optimizer = optimizer
        self.stop_training = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def _is_default(callback: Any, hook: str) -> bool:
    """Returns whether a method is that of Keras' base class, which does nothing."""
    owned = [vars(callback), *(vars(c) for c in type(callback).__mro__ if c.__name__ != "Callback")]
    names = {hook, hook.replace("_train_batch_", "_batch_")}  # the first calls the second
    return not any(name in each for name in names for each in owned)


def _flat(outputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the numbers of outputs; those of several splits have the name of the split before."""
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value
