"""A look at the step: whether its update is a function of the global batch alone."""

from typing import Any

from ml_collections import config_dict

from ctl.errors import UsageError
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import Rows, TrainerFactory
from ctl.testing import processes
from ctl.testing.report import Report

_REPLICAS = (1, 2, 4)
_EXAMPLES = 8
_TIMEOUT = 300.0  # seconds


def equivalence(blueprint: TrainerFactory) -> Outcome:
    """Compares the trainer on 1, 2 and 4 replicas, in a process of its own."""
    rows = _first(blueprint, _EXAMPLES)
    config = blueprint.experiment.config.to_dict()
    try:
        arguments = [config, blueprint.config_path, rows]
        report: Report = processes.call(compare, arguments, timeout=_TIMEOUT)[0]
    except UsageError as error:
        return Outcome(WARNING, f"not compared: {error}")
    if not report.equivalent:
        first, *rest = report.failure().splitlines()
        return Outcome(FAIL, first, " ".join(line.strip() for line in rest[:2]))
    return Outcome(
        PASS,
        f"{len(report.compared)} ways to split a batch, in {report.precision}, give one update",
    )


def compare(config: dict[str, Any], config_path: str, rows: Rows) -> Report:
    """The other process' part."""
    from ctl.configs import loading
    from ctl.modes.experiment import trainer_options
    from ctl.testing import check_replica_equivalence, split_cpu

    split_cpu(max(_REPLICAS))
    held = config_dict.ConfigDict(config)
    return check_replica_equivalence(
        loading.trainer_class(held.trainer, config_path),
        rows,
        replicas=_REPLICAS,
        options=trainer_options(held),
        in_process=True,
    )


def _first(blueprint: TrainerFactory, count: int) -> Rows:
    """The first examples, of as many batches as hold so many."""
    import numpy as np

    batches = blueprint.batches(-(-count // blueprint.batch))
    return {name: np.concatenate([b[name] for b in batches])[:count] for name in batches[0]}
