"""--sweep=tpe:20 and --sweep=random:20: Optuna chooses the values of 20 runs.

The config file defines what it chooses from:

    def get_sweep(trial):
        return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
"""

from collections.abc import Iterator, Mapping
import pathlib
import re
from typing import Any

from absl import flags

from ctl.configs import flags as command_line
from ctl.configs.flags import Changes
from ctl.errors import UsageError, type_name
from ctl.loop.workdir import name_values
from ctl.modes.sweep import settings, table

FORM = re.compile(r"(random|tpe):([1-9]\d{0,3})")  # of --sweep


def choose_runs(
    values: flags.FlagValues,
    changes: Changes,
    folder: pathlib.Path,
    entries: Mapping[str, Mapping[str, Any]],
) -> Iterator[settings.SweepRun]:
    """Yields the runs of Optuna's journal in the sweep's folder, then new ones.

    Args:
        values: the flags of the command line.
        changes: the changes of the config, which all runs have.
        folder: the folder of the sweep.
        entries: the entries of sweep.json by name of a run, whose results Optuna chooses by.

    Raises:
        UsageError: Optuna is not installed, or a value that it chooses is wrong.
    """
    kind, count = values.sweep[0].split(":")
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError(
            f"--sweep={kind} requires Optuna: pip install 'ctl-tensorflow[sweep]'."
        ) from None
    config = command_line.load_config(values.config, changes)
    if kind == "tpe" and (values.mode == "train" or not config.eval.splits):
        raise UsageError(
            "--sweep=tpe chooses values by the results of evaluations: use --mode=train_and_eval and "
            "name a split in eval.splits, or choose --sweep=random."
        )
    journal = folder / "optuna.journal"
    if values.fresh:
        journal.unlink(missing_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=settings.fingerprint(config),  # results of another config are not comparable
        direction="maximize" if config.train.best.mode == "max" else "minimize",
        load_if_exists=True,
    )

    def make_run(number: int, chosen: dict[str, str]) -> settings.SweepRun:
        name = name_values({"trial": str(number), **chosen})
        return settings.make_run(values.config, changes, chosen, name)

    # A trial without values was asked for when the sweep was killed, or has wrong ones.
    started = [trial for trial in study.trials if "values" in trial.user_attrs]
    for trial in started:
        yield make_run(trial.number, trial.user_attrs["values"])
    for _ in range(len(started), int(count)):
        for name, entry in entries.items():
            value = table.result(entry, table.name_metric(config))
            if value is not None:
                trial = int(name.partition(",")[0].removeprefix("trial="))
                study.tell(trial, value, skip_if_finished=True)
        number = len(study.trials)
        # A sampler per run: its draws do not depend on how often the sweep was resumed.
        study.sampler = optuna.samplers.RandomSampler(seed=number)
        if kind == "tpe":
            study.sampler = optuna.samplers.TPESampler(seed=number, constant_liar=True)
        new = study.ask()
        chosen = settings.call(values.config, new)
        if not isinstance(chosen, Mapping) or not chosen:
            raise UsageError(
                f"{settings.FROM_FILE}(trial) returned {type_name(chosen)}, but must return a dict of "
                "keys and values."
            )
        texts = {key: settings.as_text(value) for key, value in chosen.items()}
        run = make_run(number, texts)
        new.set_user_attr("values", texts)
        yield run
