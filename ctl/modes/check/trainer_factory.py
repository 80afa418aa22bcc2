"""A config's trainer, to be made again and again, with other data or another optimizer."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl import data, optimizers
from ctl.configs import loading
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import GlobalBatches, PerReplica
from ctl.modes.experiment import Experiment, trainer_options
from ctl.trainer import StandardTrainer

Rows = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TrainerFactory:
    """Makes trainers of an experiment, each untrained.

        blueprint = Blueprint(experiment, "experiments/mnist.py")
        trainer = blueprint.trainer()

    Attributes:
        experiment: what `experiment.build` returned.
        config_path: the file that its config is from.
    """

    experiment: Experiment
    config_path: str

    def trainer(
        self,
        *,
        rows: Mapping[str, np.ndarray] | None = None,
        optimizer: Callable[[], Any] | None = None,
        **changes: Any,
    ) -> StandardTrainer:
        """Makes one, on the experiment's own hardware.

        Args:
            rows: what to train on in place of its data: the rows of one batch.
            optimizer: makes the optimizer, if not the config's.
            **changes: of its options.
        """
        config = self.experiment.config
        cls = loading.trainer_class(config.trainer, self.config_path)
        if rows is not None:
            body = {"build_dataset": lambda trainer, split, context: data.arrays(rows)}
            cls = type(cls.__name__, (cls,), body)
        made: StandardTrainer = cls(
            strategy=self.experiment.hardware.strategy,
            global_batch_size=len(next(iter(rows.values()))) if rows else self.batch,
            optimizer=optimizer
            or optimizers.factory(
                config.optimizer,
                global_batch_size=self.batch,
                steps=config.train.steps,
                jit=config.runtime.xla != "off",
            ),
            options=dataclasses.replace(trainer_options(config), **changes),
        )
        return made

    @property
    def batch(self) -> int:
        """Examples of a global batch."""
        size: int = self.experiment.config.data.global_batch_size
        return size

    def feed(self) -> InputPipeline:
        """The data of the experiment, made anew, for one replica."""
        trainer = self.experiment.trainer
        return InputPipeline(
            trainer.build_dataset,
            strategy=tf.distribute.OneDeviceStrategy("/CPU:0"),
            seed=trainer.options.seed,
            prefetch=1,
            building=trainer.building,
        )

    def batches(self, count: int, *, start: int = 0) -> list[Rows]:
        """The first global batches from a step on, as the trainer gets them, not preprocessed."""
        feed = self.feed()
        ready = isinstance(feed.data("train"), GlobalBatches | PerReplica)
        iterator = iter(feed.training(self.batch, start=start))
        found = []
        for _ in range(count):
            element = next(iterator)
            batch = element if ready and isinstance(element, dict) else element[0]
            found.append({name: np.asarray(value) for name, value in batch.items()})
        return found
