"""Makes untrained trainers of one experiment, with other data, options or another optimizer."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from ctl import data, optimizers
from ctl.built.build import seed_and_precision
from ctl.configs import group_values, loading
from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import InputPipeline
from ctl.keras import models
from ctl.modes.experiment import Experiment
from ctl.trainer import StandardTrainer

Examples = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TrainerFactory:
    """Makes untrained trainers of an experiment, and reads its training data.

        factory = TrainerFactory(experiment, "experiments/mnist.py")
        trainer = factory.make_trainer()

    Attributes:
        experiment: the result of `experiment.build`.
        config_path: the config file; relative trainer paths start at its folder.
    """

    experiment: Experiment
    config_path: str

    @functools.cached_property
    def first_steps(self) -> tuple[StandardTrainer, tuple[float, ...]]:
        """A trainer that has made two steps on the first batch, and their losses, if it has any."""
        trainer = self.make_trainer(rows=self.read_batches(1)[0])
        outputs = [trainer.train(tf.constant(1)) or {} for _ in range(2)]
        return trainer, tuple(float(each["loss"]) for each in outputs if "loss" in each)

    def make_trainer(
        self,
        *,
        rows: Mapping[str, np.ndarray] | None = None,
        optimizer: Callable[[], Any] | None = None,
        **options: Any,
    ) -> StandardTrainer:
        """Makes an untrained trainer on the experiment's own hardware.

        Args:
            rows: one batch, name -> [rows, ...], to train on instead of the experiment's data.
            optimizer: makes the optimizer; the config's optimizer by default.
            **options: fields of `TrainerOptions` that replace the config's values.
        """
        config = self.experiment.config
        cls = loading.load_trainer_class(config.trainer, self.config_path, StandardTrainer)
        if rows is not None:
            body = {"build_dataset": lambda trainer, split, context: data.arrays(rows)}
            cls = type(cls.__name__, (cls,), body)
        # Layers without a name of their own are numbered by process, and options name them by pattern.
        models.reset_names()
        trainer_options = TrainerOptions.from_config(config)
        if optimizer:  # for all variables
            groups = group_values.without(trainer_options.optimizer_groups, "optimizer")
            options = {"optimizer_groups": groups, **options}
        trainer: StandardTrainer = cls(
            strategy=self.experiment.hardware.strategy,
            global_batch_size=len(tf.nest.flatten(rows)[0]) if rows else self.global_batch_size,
            optimizer=optimizer or optimizers.FromConfig(lambda _: config),
            options=dataclasses.replace(trainer_options, **options),
        )
        return trainer

    @property
    def global_batch_size(self) -> int:
        """The number of examples of a global batch."""
        size: int = self.experiment.config.data.global_batch_size
        return size

    def input_pipeline(self) -> InputPipeline:
        """Makes a new input pipeline over the experiment's data, for one replica."""
        trainer = self.experiment.trainer
        return InputPipeline(
            trainer.build_dataset,
            strategy=tf.distribute.OneDeviceStrategy("/CPU:0"),
            seed=trainer.options.seed,
            prefetch=1,
            build_scope=functools.partial(seed_and_precision, trainer.options),
        )

    def read_batches(self, count: int, *, start: int = 0) -> list[Examples]:
        """Reads global training batches before `preprocess`.

        Args:
            count: the number of batches.
            start: the global step of the first batch.
        """
        pipeline = self.input_pipeline()
        is_batched = pipeline.data("train").in_batches
        iterator = iter(pipeline.training_dataset(self.global_batch_size, start=start))
        batches = []
        for _ in range(count):
            element = next(iterator)
            batch = element if is_batched and isinstance(element, dict) else element[0]
            batches.append(tf.nest.map_structure(np.asarray, batch))
        return batches
