"""Checks that the update is a function of the global batch alone, on 1, 2 and 4 replicas."""

from typing import Any

from ml_collections import config_dict
import numpy as np

from ctl.configs import loading
from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import Rows, TrainerFactory
from ctl.testing import check_replica_equivalence, processes, split_cpu
from ctl.testing.report import Report
from ctl.trainer import StandardTrainer

_REPLICAS = (1, 2, 4)
_EXAMPLES = 8
_TIMEOUT = 300.0  # seconds


def check_equivalence(factory: TrainerFactory) -> Outcome:
    """Compares the trainer's updates on 1, 2 and 4 replicas.

    TensorFlow fixes its devices at first use, so the comparison needs a process of its own.
    """
    rows = _read_examples(factory, _EXAMPLES)
    arguments = [factory.experiment.config.to_dict(), factory.config_path, rows]
    try:
        report: Report = processes.call(compare_splits, arguments, timeout=_TIMEOUT)[0]
    except UsageError as error:
        return Outcome(WARNING, f"not compared: {error}")
    if not report.equivalent:
        first, *rest = report.failure().splitlines()
        return Outcome(FAIL, first, " ".join(line.strip() for line in rest[:2]))
    return Outcome(
        PASS,
        f"{len(report.compared)} ways to split a batch, in {report.precision}, give one update",
    )


def compare_splits(config: dict[str, Any], config_path: str, rows: Rows) -> Report:
    """Compares the splits; it runs in the other process, so its arguments can be pickled."""
    split_cpu(max(_REPLICAS))
    resolved = config_dict.ConfigDict(config)
    return check_replica_equivalence(
        loading.load_trainer_class(resolved.trainer, config_path, StandardTrainer),
        rows,
        replicas=_REPLICAS,
        options=TrainerOptions.from_config(resolved),
        in_process=True,
    )


def _read_examples(factory: TrainerFactory, count: int) -> Rows:
    """Reads the first `count` examples, from as many batches as needed."""
    batches = factory.read_batches(-(-count // factory.global_batch_size))
    return {name: np.concatenate([b[name] for b in batches])[:count] for name in batches[0]}
