"""--sweep: runs an experiment with several values of its keys, each in a run of its own.

Optuna's journal records the values of the runs, and which of them are done. With tpe:20 and random:20
Optuna also chooses the values, from what the config file defines:

    def get_sweep(trial):
        return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

from absl import flags

from ctl.configs import flags as command_line
from ctl.configs import overrides
from ctl.configs.error_location import error_location
from ctl.configs.flags import Changes
from ctl.configs.loading import import_file
from ctl.errors import UsageError, align, print_line, type_name
from ctl.hardware import gpu
from ctl.hardware.child_process import ChildProcess, pass_on, receive_signals
from ctl.loop import lock
from ctl.loop.progress import format_duration, format_numbers
from ctl.loop.workdir import Workdir, name_experiment, name_values
from ctl.modes import DONE, FAILED, STOPPED

FROM_FILE = "get_sweep"  # the value of --sweep that calls the function of this name
_SEARCH = re.compile(r"(random|tpe):([1-9]\d{0,3})")  # a value of --sweep
_JOURNAL = "optuna.journal"
_IMPORTS = ("trainer", "optimizer.", "actions", "summaries.writers")  # keys that can name code
_CODE = re.compile(r"[\w./-]+:[A-Za-z_]\w*")  # what a value may name, such as mine.py:Trainer
_FRESH = "start the sweep from scratch by --fresh, or name another --workdir"
_PROGRAM = (sys.executable, "-m", "ctl.main")
_POLL = 0.1  # seconds


@dataclasses.dataclass
class SweepRun:
    """One run of a sweep.

    Attributes:
        number: the number of its trial in Optuna's journal.
        name: the name of its folder, which depends on its values only.
        values: full name of a key -> value, as text for the command line.
        status: "waiting", "running", "done", "stopped" or "failed".
        process: its process, once it was started.
    """

    number: int
    name: str
    values: Mapping[str, str]
    status: str = "waiting"
    process: ChildProcess = dataclasses.field(init=False, repr=False, compare=False)  # by `start`

    def start(self, command: list[str], folder: pathlib.Path, device: Mapping[str, str]) -> None:
        """Starts the process, whose workdir is in the folder of the sweep."""
        values = [f"--config.{key}={text}" for key, text in self.values.items()]
        workdir = f"--workdir={folder / self.name}"
        self.status = "running"
        self.process = ChildProcess(self.name, [*command, *values, workdir], device)

    def end(self, *, was_stopped: bool) -> None:
        """Sets the status after the end of the process."""
        self.process.kill()  # prints the rest of its output
        code = self.process.exit_code
        # A signal may reach a process before it can handle it.
        other = "stopped" if was_stopped else "failed"
        ended: dict[int | None, str] = {DONE: "done", STOPPED: "stopped"}
        self.status = ended.get(code, other)
        print_line(f"[{self.name}] {self.status}" + (f" ({code})" if code else ""))


def run(values: flags.FlagValues, changes: Changes) -> int:
    """Runs a sweep.

    A run that is done is not started again. A run that was stopped or killed resumes from its last
    checkpoint. A run that fails does not stop the others. A first Ctrl-C or SIGTERM stops the runs,
    which save; a second one kills them.

    Args:
        values: the flags of the command line.
        changes: the changes of the config, which all runs have.

    Returns:
        The exit code: 0 if all runs are done, 1 if one of them failed, 75 if the sweep was stopped.

    Raises:
        UsageError: a setting is wrong; no run was started then.
    """
    if "TF_CONFIG" in os.environ:
        raise UsageError("--sweep starts its runs on this machine: unset TF_CONFIG.")
    if values.dry_run:
        raise UsageError("--dry_run tries one run: remove --sweep, or --dry_run.")
    devices = _divide_devices(values.sweep_parallel or "1")
    # Before the folder is created: it reports mistakes outside of the sweep.
    config = command_line.load_config(values.config, changes)
    search = _SEARCH.fullmatch(" ".join(values.sweep))
    listed = {} if search else list_runs(values.config, changes, values.sweep)
    if search and search[1] == "tpe" and (values.mode == "train" or not config.eval.splits):
        raise UsageError(
            "--sweep=tpe chooses values by the results of evaluations: use --mode=train_and_eval and "
            "name a split in eval.splits, or choose --sweep=random."
        )
    folder = _find_folder(values)
    metric = config.train.best.metric or "eval/loss"
    with lock.RunLock(folder) as run_lock, receive_signals() as signals:
        run_lock.acquire()
        study = _open_study(folder / _JOURNAL, config, fresh=values.fresh)
        chosen = _choose(study, values, changes) if search else _resume(study, listed)
        runs: list[SweepRun] = []
        for each in _run_all(chosen, runs, _command(values, changes), folder, devices, signals):
            _tell(study, each, _read_row(each, folder).get(metric, math.nan))
    _print_table(runs, folder, metric, largest=config.train.best.mode == "max")
    states = {each.status for each in runs}
    if signals or "stopped" in states:
        print_line(f"The sweep in {folder} was stopped: rerun the same command to resume.")
        return STOPPED
    return DONE if states == {"done"} else FAILED


def _find_folder(values: flags.FlagValues) -> pathlib.Path:
    """Returns the folder of the sweep; raises UsageError if it has other files than a sweep's."""
    folder = pathlib.Path(values.workdir or f"runs/{name_experiment(values.config)}.sweep")
    names = {path.name for path in folder.glob("*")} - {lock.NAME}
    if names and _JOURNAL not in names:
        raise UsageError(
            f"{folder} has files in it and no {_JOURNAL}, so it is not a sweep's folder: name another "
            "--workdir."
        )
    return folder


def _command(values: flags.FlagValues, changes: Changes) -> list[str]:
    """Returns the command of every run, without its values and its workdir."""
    command = [*_PROGRAM, f"--config={values.config}", f"--mode={values.mode}"]
    command += [f"--{name}" for name in command_line.SWITCHES if values[name].value]
    return command + [
        f"--config.{key}" + ("" if text is None else f"={text}") for key, text in changes
    ]


def _run_all(
    chosen: Iterator[SweepRun], runs: list[SweepRun], command: list[str], folder: pathlib.Path,
    free: list[Mapping[str, str]], signals: Any,
) -> Iterator[SweepRun]:  # fmt: skip
    """Runs all that are chosen, which it appends to `runs`, on free devices; yields those that end."""
    while True:
        while free and not signals and (new := next(chosen, None)):
            runs.append(new)
            if new.status != "done":
                new.start(command, folder, free.pop())
        running = [each for each in runs if each.status == "running"]
        if not running:
            return
        time.sleep(_POLL)
        pass_on(signals, [each.process for each in running])
        for each in running:
            if each.process.exit_code is not None:
                each.end(was_stopped=bool(signals))
                free.append(each.process.environment)
                yield each


def list_runs(config: str, changes: Changes, sweeps: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the runs of a sweep whose values are known, and checks the config of each.

    Args:
        config: the flag --config.
        changes: the changes of the config that all runs have.
        sweeps: the values of --sweep: KEY=VALUE,VALUE,... each, or "get_sweep".

    Returns:
        The name of each run -> full name of a key -> value, as text for the command line.

    Raises:
        UsageError: a key or a value is wrong.
    """
    values = _call(config) if [*sweeps] == [FROM_FILE] else dict(map(_parse, sweeps))
    if FROM_FILE not in sweeps and len(values) < len(sweeps):
        raise UsageError("--sweep names a key twice: give all its values at once, KEY=VALUE,VALUE.")
    lists = [*values.values()] if isinstance(values, Mapping) else [values]
    if not lists or not all(isinstance(each, list | tuple) and each for each in lists):
        raise UsageError(
            f"{FROM_FILE}() of {config} returned {type_name(values)}, but must return a dict of "
            "non-empty lists, whose product is run, or a list of dicts, one per run."
        )
    if isinstance(values, Mapping):
        values = [dict(zip(values, each, strict=True)) for each in itertools.product(*lists)]
    return {
        name_values(texts): texts for texts in (_checked_texts(v, config, changes) for v in values)
    }


def _parse(text: str) -> tuple[str, list[str]]:
    """Splits KEY=VALUE,VALUE at the commas outside of brackets and quotes."""
    key, equals, rest = text.partition("=")
    values = re.findall(r"""(?:[^,\[({'"]|\[[^]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|"[^"]*")+""", rest)
    if not equals or not key or not values or ",".join(values) != rest:
        raise UsageError(
            f"--sweep is {text!r}, but must be KEY=VALUE,VALUE,..., such as "
            f"--sweep=optimizer.learning_rate=1e-3,3e-3, or one --sweep={FROM_FILE} or --sweep=tpe:20."
        )
    return key, values


def _call(config: str, *arguments: Any) -> Any:
    """Calls `get_sweep` of a config file."""
    path = pathlib.Path(config.partition(":")[0])
    function = getattr(import_file(path), FROM_FILE, None)
    if not callable(function):
        form = f"{FROM_FILE}(trial)" if arguments else f"{FROM_FILE}()"
        value = 'trial.suggest_float("rate", 1e-4, 1e-2)' if arguments else "[1e-3, 3e-3]"
        raise UsageError(
            f"{path} has no {form}: define one that returns a dict, such as "
            f'{{"optimizer.learning_rate": {value}}}.'
        )
    try:
        return function(*arguments)
    except Exception as error:
        raise UsageError(f"{FROM_FILE}() fails: {error_location(error, path)}") from error


def _checked_texts(values: Any, config: str, changes: Changes) -> dict[str, str]:
    """Returns the values of a run as the command line has them, and checks its config."""
    if not isinstance(values, Mapping) or not values:
        raise UsageError(
            f"{FROM_FILE}() returned {type_name(values)} for a run, but must return a dict of keys and "
            "values that is not empty."
        )
    texts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in values.items()}
    command_line.load_config(config, [*changes, *texts.items()])
    return texts


def _open_study(path: pathlib.Path, config: Any, *, fresh: bool) -> Any:
    """Opens Optuna's journal of a sweep."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError("--sweep requires Optuna: pip install 'ctl-tensorflow[sweep]'.") from None
    if fresh:
        path.unlink(missing_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Optuna would append to a last line that a kill has cut short.
    if path.exists() and (end := path.read_bytes().rfind(b"\n") + 1):
        os.truncate(path, end)
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    content = repr(sorted(overrides.flatten(config).items()))
    with _report_damage():
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            # Results of another config are not comparable.
            study_name=hashlib.sha256(content.encode()).hexdigest(),
            direction="maximize" if config.train.best.mode == "max" else "minimize",
            load_if_exists=True,
        )


@contextlib.contextmanager
def _report_damage() -> Iterator[None]:
    """Turns the errors of Optuna about a damaged journal, which have no common class, into one line."""
    try:
        yield
    except (UsageError, OSError):
        raise
    except Exception as error:
        what = f"{_JOURNAL} cannot be read ({type(error).__name__})"
        raise UsageError(f"{what}: restore it, or {_FRESH}.") from None


def _resume(study: Any, listed: Mapping[str, Mapping[str, str]]) -> Iterator[SweepRun]:
    """Yields the runs of a list, from Optuna's journal where it has them."""
    known = _read_journal(study)
    for name, values in listed.items():
        new = None if name in known else _record(study.ask(), name, values)
        yield new or dataclasses.replace(known[name], values=values)


def _choose(study: Any, values: flags.FlagValues, changes: Changes) -> Iterator[SweepRun]:
    """Yields the runs of Optuna's journal, then new ones whose values Optuna chooses.

    A trial without a run was asked for when the sweep was killed, or has wrong values.
    """
    from optuna import samplers

    kind, count = values.sweep[0].split(":")
    known = [run for name, run in _read_journal(study).items() if name.startswith("trial=")]
    source = pathlib.Path(values.config.partition(":")[0]).read_text(encoding="utf-8")
    pairs = (pair for run in known for pair in run.values.items())
    imported = " ".join(text for key, text in pairs if key.startswith(_IMPORTS))
    for code in _CODE.findall(imported):
        if code not in source:  # a journal is data, which must not choose what is imported
            raise UsageError(f"{_JOURNAL} names {code}, but {values.config} does not: {_FRESH}.")
    yield from known
    for _ in range(len(known), int(count)):
        number = len(study.trials)
        # A sampler per run: its draws do not depend on how often the sweep was resumed.
        study.sampler = samplers.RandomSampler(seed=number)
        if kind == "tpe":
            study.sampler = samplers.TPESampler(seed=number, constant_liar=True)
        trial = study.ask()
        texts = _checked_texts(_call(values.config, trial), values.config, changes)
        yield _record(trial, name_values({"trial": str(number), **texts}), texts)


@_report_damage()
def _read_journal(study: Any) -> dict[str, SweepRun]:
    """Returns the runs of the journal by their names."""
    runs = {}
    for trial in study.trials:
        if known := trial.user_attrs.get("run"):
            texts = {"trial": str(trial.number), **known["values"]}
            if known["name"] not in (name_values(texts), name_values(known["values"])):
                raise UsageError(f"{_JOURNAL} has a run {known['name']!r}, not {texts}: {_FRESH}.")
            status = "done" if trial.state.is_finished() else "waiting"
            runs[known["name"]] = SweepRun(trial.number, status=status, **known)
    return runs


def _record(trial: Any, name: str, values: Mapping[str, str]) -> SweepRun:
    trial.set_user_attr("run", {"name": name, "values": values})
    return SweepRun(trial.number, name, values)


def _tell(study: Any, each: SweepRun, value: float) -> None:
    """Records that a run is done, with the metric that decides which run is best."""
    from optuna.trial import TrialState

    if each.status == "done":
        result = {"values": value} if math.isfinite(value) else {"state": TrialState.FAIL}
        study.tell(each.number, **result)


def _print_table(
    runs: Sequence[SweepRun], folder: pathlib.Path, metric: str, *, largest: bool
) -> None:
    rows = [_read_row(each, folder) for each in runs]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    lines = align([names, *([_show(row.get(name, "")) for name in names] for row in rows)])
    lines += [f"{e.name}: {e.process.line}" for e in runs if e.status in ("failed", "stopped")]
    done = [
        (row[metric], each.name, row["seconds"])
        for each, row in zip(runs, rows, strict=True)
        if each.status == "done" and math.isfinite(row.get(metric, math.nan))
    ]
    if len(done) > 1:
        value, name, seconds = (max if largest else min)(done)
        lines.append(f"Best {metric}: {_show(value)} of {name}, {format_duration(seconds or 0)}.")
    print_line("\n".join([*lines, f"Sweep: {folder}; ctl report {folder}"]))


def _read_row(each: SweepRun, folder: pathlib.Path) -> dict[str, Any]:
    """Returns one row of the table: the values of the run, its state, and its last numbers."""
    result = {"step": "", "seconds": "", **Workdir(folder / each.name, writes=False).result()}
    numbers = flatten("eval", result.get("eval")) or flatten("train", result.get("train"))
    numbers.pop("eval/examples", None)
    head = {**each.values, "status": each.status, "step": result["step"]}
    return {**head, **numbers, "seconds": result["seconds"]}


def flatten(name: str, values: Any) -> dict[str, Any]:
    """Returns the numbers of a result by their names, such as "eval/loss"."""
    flat = overrides.flatten({name: values}, separator="/")
    return {key: value for key, value in flat.items() if isinstance(value, int | float)}


def _show(value: Any) -> str:
    return format_numbers({"": value}).strip() if isinstance(value, float) else str(value)


def _divide_devices(parallel: str) -> list[Mapping[str, str]]:
    """Returns the variables that give each of the parallel runs GPUs of its own."""
    if not parallel.isdecimal() or not int(parallel):
        raise UsageError(
            f"--sweep_parallel is {parallel!r}, but must be a number of runs, at least 1."
        )
    count, gpus = int(parallel), gpu.list_gpus()
    if not gpus or count == 1:
        return [{}] * count
    if count > len(gpus):
        raise UsageError(
            f"--sweep_parallel is {count}, but this machine has {len(gpus)} GPUs, and each run uses at "
            "least one: start fewer runs, or set CUDA_VISIBLE_DEVICES=-1 to use the CPU."
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot::count])} for slot in range(count)]
