"""Selects the checkpoint of a run, exports it (--mode=export), and loads it (`ctl.load`)."""

from collections.abc import Mapping
import functools
import os
import pathlib
from typing import Any

from ml_collections import config_dict
import numpy as np
import tensorflow as tf

from ctl.built.inner_loop import pipeline_of
from ctl.configs import flags, keys, loading
from ctl.configs.options import TrainerOptions
from ctl.data.features import RESERVED
from ctl.errors import UsageError, is_url, list_some, print_line
from ctl.loop import inference, json_files
from ctl.loop.actions import best_checkpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.exports import export_checkpoint
from ctl.loop.store import fetch
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments
from ctl.modes.experiment import resolve_batch_size
from ctl.trainer import StandardTrainer


def export(arguments: Arguments) -> int:
    """Exports a checkpoint of a run, by default the one of its result; returns the exit code."""
    workdir = arguments.workdir
    if not workdir.writes:
        raise UsageError(f"{workdir.exports} cannot be written: copy the run, and export the copy.")
    config = resolve_batch_size(arguments.config, 1)
    step, exported = export_checkpoint(
        loading.load_trainer_class(config.trainer, arguments.config_path, StandardTrainer),
        TrainerOptions.from_config(config),
        # Last, since a run that trains meanwhile may delete it.
        path := select_checkpoint(workdir, arguments.checkpoint),
        workdir.exports,
        global_batch_size=config.data.global_batch_size,
    )
    workdir.event("export", step, **exported)
    print_line(f"Exported {path} to {exported['path']} ({exported['weights']} weights).")
    return DONE


def select_checkpoint(workdir: Workdir, name: str) -> str:
    """Returns the path of the checkpoint that the user names, or of the run's result.

    Raises:
        UsageError: there is no such checkpoint.
    """
    path = find_checkpoint(workdir, name)
    files = CheckpointFiles(workdir.checkpoints)
    steps = files.steps()
    if path is None and not steps:
        raise UsageError(f"{workdir.path} has no checkpoint: train first.")
    return path or files.path(steps[-1])


def load(
    workdir: str | os.PathLike[str], checkpoint: str | int = "",
    *, config: str = "", average: bool = True, trust_code: bool = False,
) -> "TrainedModel":  # fmt: skip
    """Loads the trained model of a run.

        model = ctl.load("runs/mnist")
        model({"image": images})            # raw images, as build_dataset gives them

    Args:
        workdir: the folder of the run, or its URL.
        checkpoint: "best", a step, a path or a URL; by default the one whose evaluation is the result
            of the run, which is the newest, or the best one if that was restored.
        config: your config file of the experiment, whose trainer is used; by default the trainer that
            the run names. A run in a store requires it, since others may write there.
        average: whether to use the averaged weights, if the run has them, as its evaluations do.
        trust_code: import the trainer that a run in a store names, from this machine.

    Raises:
        UsageError: there is no such run or checkpoint, or its trainer cannot be imported.
    """
    folder = Workdir(fetch(str(workdir), str(checkpoint)), writes=False)
    folder.check_run()
    chosen = fetch(str(checkpoint))
    values = keys.defaults()
    with values.ignore_type():
        content = json_files.read(folder.path / "config.json", trainer=str)
        values.update(config_dict.ConfigDict(content))
    named = flags.load_config(config, []).trainer if config else values.trainer
    if not config and is_url(workdir) and not trust_code:
        raise UsageError(
            f"{workdir} names the code that loads it, {named!r}: pass your file of the experiment as "
            "config, or trust_code=True to import that."
        )
    config_path = config.partition(":")[0] or folder.config_file()
    trainer = inference.restore_trainer(
        loading.load_trainer_class(named, config_path, StandardTrainer),
        TrainerOptions.from_config(values),
        path := select_checkpoint(folder, chosen),
        global_batch_size=values.data.global_batch_size,
        average=average,
    )
    return TrainedModel(trainer, path)


class TrainedModel:
    """Computes the outputs of raw examples: `preprocess`, then the model, as in an evaluation.

        model = ctl.load("runs/mnist")
        logits = model({"image": images})                   # a tensor
        logits = model.predict(images, batch_size=256)      # an array; one feature needs no name

    Args:
        trainer: the result of `inference.restore_trainer`; it cannot be trained.
        path: the checkpoint that it was restored from.

    Attributes:
        step: the step of the checkpoint.
        model_without_preprocess: the tf_keras model alone. It computes nonsense from raw examples if
            `preprocess` changes them.
    """

    def __init__(self, trainer: StandardTrainer, path: str | pathlib.Path):
        self.trainer = trainer
        self.path = str(path)
        self.step = int(trainer.global_step.numpy())
        self.model_without_preprocess = trainer.model

    @functools.cached_property
    def _function(self) -> Any:
        return inference.make_function(self.trainer, self.trainer.serve)

    @property
    def _specs(self) -> dict[str, tf.TensorSpec]:
        return self._function.input_signature[0]

    def __call__(self, features: Any) -> Any:
        """Computes the outputs of raw examples.

        Args:
            features: name -> [rows, ...] as `build_dataset` gives them, or an array if there is one
                feature. A label, a weight and features that `serve` does not use are ignored.

        Returns:
            What the trainer's `serve` returns.

        Raises:
            UsageError: a feature is missing, or has another dtype or shape than in training.
        """
        return self._function(self._check(features))

    def predict(self, features: Any, *, batch_size: int = 256) -> Any:
        """Computes the outputs of any number of raw examples, in batches.

        Args:
            features: as for a call.
            batch_size: the number of rows that are computed at a time.

        Returns:
            What the trainer's `serve` returns, as numpy arrays.

        Raises:
            UsageError: as for a call, or `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, but must be at least 1.")
        features = self._check(features)
        count = len(next(iter(features.values())))
        parts = [
            tf.nest.map_structure(
                np.asarray,
                self._function({k: v[first : first + batch_size] for k, v in features.items()}),
            )
            for first in range(0, max(count, 1), batch_size)
        ]
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    def _check(self, features: Any) -> dict[str, tf.Tensor]:
        if not isinstance(features, Mapping):
            if len(self._specs) > 1:
                raise UsageError(f"The features are {', '.join(self._specs)}: pass a dict of them.")
            features = {next(iter(self._specs)): features}
        known = pipeline_of(self.trainer).element_spec().keys()
        names = set(features) - (known | {*RESERVED}) | set(features) & set(self._specs)
        if names != self._specs.keys():
            raise UsageError(
                f"The features are {', '.join(sorted(names))}, but must be {', '.join(self._specs)}."
            )
        return {name: _convert(name, features[name], spec) for name, spec in self._specs.items()}


def _convert(name: str, value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is no array of {spec.dtype.name} {spec.shape}.") from None
    numeric = tensor.dtype != tf.string and spec.dtype != tf.string
    # Images that are scaled already must not be rounded to the raw integers.
    converts = numeric and np.can_cast(
        tensor.dtype.as_numpy_dtype, spec.dtype.as_numpy_dtype, "same_kind"
    )
    if not (tensor.dtype == spec.dtype or converts) or not spec.shape.is_compatible_with(
        tensor.shape
    ):
        raise UsageError(
            f"{name} is {tensor.dtype.name} {tensor.shape}, but must be raw examples, "
            f"{spec.dtype.name} {spec.shape}, as build_dataset gives them."
        )
    return tf.cast(tensor, spec.dtype) if tensor.dtype != spec.dtype else tensor


def find_checkpoint(workdir: Workdir, name: str) -> str | None:
    """Returns the path of a checkpoint of a run.

    Args:
        workdir: the folder of the run.
        name: "best", a step, or a path; "" for the checkpoint whose evaluation is the result of the
            run.

    Returns:
        The path; None for the newest checkpoint that can be read.

    Raises:
        UsageError: there is no such checkpoint.
    """
    if not name:
        return _find_restored(workdir)
    if name == "best":
        return best_checkpoint.find_best(workdir.best)
    folders = [CheckpointFiles(folder) for folder in (workdir.checkpoints, workdir.best)]
    if name.isdecimal():
        for files in folders:
            if int(name) in files.steps():
                return files.path(int(name))
        steps = sorted({step for files in folders for step in files.steps()})
        raise UsageError(
            f"--checkpoint={name}: {workdir.path} has no checkpoint of this step, but of "
            f"{list_some([str(step) for step in steps]) or 'none'}."
        )
    path = name.removesuffix(".index")
    if not os.path.exists(f"{path}.index"):
        raise UsageError(
            f"--checkpoint is {name!r}, but must be best, a step, or a checkpoint's path, such as "
            f"{folders[0].path(1000)}."
        )
    return path


def _find_restored(workdir: Workdir) -> str | None:
    """Returns the best checkpoint if the run ended by restoring it; None otherwise."""
    result = workdir.result()
    steps = CheckpointFiles(workdir.checkpoints).steps()
    # A run that was continued since then has no result yet.
    has_ended = bool(steps) and result.get("step") == steps[-1]
    if has_ended and (result.get("best") or {}).get("restored"):
        return best_checkpoint.find_best(workdir.best)
    return None
