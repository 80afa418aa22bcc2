"""Makes the writers that a config names."""

from collections.abc import Sequence
import pathlib

from ctl.configs import loading
from ctl.configs.values import WRITERS
from ctl.loop.writers.lines import CsvWriter, JsonLinesWriter
from ctl.loop.writers.writer import Writer


def make_writers(names: Sequence[str], workdir: pathlib.Path, config_path: str) -> list[Writer]:
    """Makes the writers of `summaries.writers`, except the TensorBoard writer.

    Args:
        names: names in `WRITERS`, or path/to/file.py:Class or package.module:Class of a `Writer` that
            is constructed with the workdir.
        workdir: the folder of the run.
        config_path: the config file; the paths of writers are relative to its folder.

    Raises:
        UsageError: the class of a writer cannot be loaded.
    """
    writers: list[Writer] = []
    for index, name in enumerate(names):
        if name == "jsonl":
            writers.append(JsonLinesWriter(workdir / "metrics.jsonl"))
        elif name == "csv":
            writers.append(CsvWriter(workdir / "metrics.csv"))
        elif name == "mlflow":
            from ctl.loop.writers.mlflow import MlflowWriter

            writers.append(MlflowWriter(workdir))
        elif name == "wandb":
            from ctl.loop.writers.wandb import WandbWriter

            writers.append(WandbWriter(workdir))
        elif name not in WRITERS:
            key = f"summaries.writers[{index}]"
            writers.append(loading.load_action_factory(name, config_path, key=key)(workdir))
    return writers
