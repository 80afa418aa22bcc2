"""How the runs of a sweep are made, started, stopped and resumed; a program stands in for ctl.main."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import optuna
import pytest

from ctl import main
from ctl.errors import UsageError
from ctl.modes import sweep as sweeps
from tests.support import child, experiments
from tests.support.faults import damage as damages

GET_SWEEP = """
def get_sweep(trial):
    return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
"""
# Ends by its seed: 1 is done, 2 fails, 3 waits to be stopped the first time.
PROGRAM = """\
import json, pathlib, signal, sys, time
values = dict(a.removeprefix("--config.").removeprefix("--").split("=", 1) for a in sys.argv[1:]
              if "=" in a)
workdir, seed = pathlib.Path(values["workdir"]), int(values["seed"])
workdir.mkdir(exist_ok=True)
with open(workdir / "starts", "a") as file:
    file.write("x")
def stop(*_):
    print("stopped", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(workdir / "running").write_text("")
if seed == 2:
    sys.exit("ctl: no such data")
if seed >= 3 and (workdir / "starts").read_text() == "x":
    time.sleep(60)
result = {"step": 10, "eval": {"loss": 1 / seed, "examples": 5}, "seconds": 1.0}
(workdir / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG, "program.py": PROGRAM})
    monkeypatch.setattr(sweeps, "_PROGRAM", (sys.executable, "program.py"))

    def run(*flags):
        return main.run(["ctl", "--config=experiment.py", "--workdir=sweep", *flags])

    return run


def starts(seed):
    return len(pathlib.Path(f"sweep/seed={seed}/starts").read_text())


def start_before(seed):
    """Lets a run that waits the first time end."""
    experiments.write(".", {f"sweep/seed={seed}/starts": "x"})
    pathlib.Path("sweep/optuna.journal").touch()


def interrupt_after(*steps):
    """Sends SIGINT to this process each time that all files of a step exist."""

    def interrupt():
        for names in steps:
            while not all(pathlib.Path("sweep", name).exists() for name in names):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_table_has_a_row_per_run_and_names_the_best(sweep, capsys):
    start_before(3)
    best = ["--config.train.best.metric=eval/loss", "--config.train.best.mode=max"]
    assert sweep("--sweep=seed=1,2,3", "--sweep_parallel=2", *best) == 1
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if not line.startswith("[")]
    assert table[0] == ["seed", "status", "step", "eval/loss", "seconds"]
    assert table[1] == ["1", "done", "10", "1.0000", "1.0000"]
    assert table[2][:2] == ["2", "failed"]
    assert table[3] == ["3", "done", "10", "0.3333", "1.0000"]
    assert "seed=2: ctl: no such data" in lines
    assert "Best eval/loss: 1.0000 of seed=1, 1 s." in lines


def test_interrupted_sweep_stops_its_runs_and_resumes_with_those_that_are_not_done(sweep, capsys):
    assert sweep("--sweep=seed=1") == 0
    interrupt_after(["seed=4/running", "seed=5/running"])
    assert sweep("--sweep=seed=1,4,5,6", "--sweep_parallel=2") == 75
    out = capsys.readouterr().out
    assert "[seed=4] stopped (75)\n" in out and "[seed=5] stopped (75)\n" in out
    assert "rerun the same command to resume" in out
    start_before(6)
    assert sweep("--sweep=seed=1,4,5,6", "--sweep_parallel=3") == 0
    assert (starts(1), starts(4), starts(5)) == (1, 2, 2)
    assert "Best eval/loss: 0.1667 of seed=6, 1 s." in capsys.readouterr().out


def test_second_signal_kills_a_run(sweep, capsys):
    record = '(workdir / "asked").write_text("")'
    pathlib.Path("program.py").write_text(PROGRAM.replace("sys.exit(75)", record))
    interrupt_after(["seed=4/running"], ["seed=4/asked"])
    assert sweep("--sweep=seed=4") == 75
    assert "[seed=4] stopped (137)\n" in capsys.readouterr().out


def test_done_run_is_started_again_if_its_config_changes_or_with_fresh(sweep):
    assert sweep("--sweep=seed=1") == sweep("--sweep=seed=1") == 0
    assert starts(1) == 1
    assert sweep("--sweep=seed=1", "--config.train.steps=7") == 0
    assert starts(1) == 2
    assert sweep("--sweep=seed=1", "--config.train.steps=7", "--fresh") == 0
    assert starts(1) == 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--sweep=seed=1,2 --sweep_parallel=0", "--sweep_parallel is '0', but must be a number"),
        ("--sweep_parallel=2", "--sweep_parallel has no effect without --sweep: remove it."),
        ("--sweep", "--sweep has no value: write --sweep=optimizer.learning_rate=1e-3,3e-3."),
        ("--sweep=seed=1 --dry_run", "--dry_run tries one run: remove --sweep, or --dry_run."),
        ("--sweep=seed=1 --mode=eval", "--sweep has no effect with --mode=eval: remove it."),
        ("--sweep=seed=1 --workdir=.", "has files in it and no optuna.journal"),
        ("--sweep=tpe:2 --mode=train", "--sweep=tpe chooses values by the results of evaluations"),
        ("--sweep=tpe:2", "experiment.py has no get_sweep(trial): define one that returns a dict,"),
    ],
)
def test_mistake_is_one_line_and_starts_nothing(sweep, capsys, flags, line):
    assert sweep(*flags.split()) == 2
    assert line in capsys.readouterr().err
    assert not list(pathlib.Path(".").rglob("running"))


class Done:
    """A process that has ended with a loss that grows with the learning rate."""

    exit_code, line = 0, ""

    def __init__(self, name, command, environment):
        self.environment = environment
        values = dict(argument.split("=", 1) for argument in command if "=" in argument)
        folder = pathlib.Path(values["--workdir"])
        folder.mkdir(parents=True, exist_ok=True)
        loss = float(values["--config.optimizer.learning_rate"])
        result = {"step": 10, "eval": {"loss": loss}, "seconds": 1.0}
        (folder / "result.json").write_text(json.dumps(result))

    def kill(self):
        pass


@pytest.fixture
def search(sweep, monkeypatch):
    """Runs a search whose runs end at once; returns the names of its runs in order."""
    monkeypatch.setattr(sweeps, "ChildProcess", Done)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    experiments.write(".", {"experiment.py": experiments.CONFIG + GET_SWEEP})

    def run(kind, workdir):
        assert sweep(f"--sweep={kind}", f"--workdir={workdir}") == 0
        names = [path.name for path in pathlib.Path(workdir).glob("trial=*")]
        return sorted(names, key=lambda name: int(name.partition(",")[0].removeprefix("trial=")))

    return run


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_resumed_search_makes_the_runs_of_the_undisturbed_one(search, kind):
    alone = search(f"{kind}:14", "alone")
    assert len(search(f"{kind}:12", "resumed")) == 12
    assert search(f"{kind}:14", "resumed") == alone
    assert [name.partition(",")[0] for name in alone] == [f"trial={i}" for i in range(14)]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("../../stolen", {"seed": "1"}, "optuna.journal has a run '../../stolen', not {"),
        (None, {"trainer": "/a/evil.py:T"}, "optuna.journal names /a/evil.py:T, but experiment.py"),
    ],
)
def test_journal_is_data(search, sweep, capsys, name, values, message):
    search("random:1", "sweep")
    run = {"name": name or sweeps.name_values({"trial": "0", **values}), "values": values}
    journal = pathlib.Path("sweep/optuna.journal")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines = [line | ({"user_attr": {"run": run}} if "user_attr" in line else {}) for line in lines]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sweep("--sweep=random:2") == 2
    error = capsys.readouterr().err
    assert message in error and "by --fresh, or name another --workdir" in error
    assert len(list(pathlib.Path("sweep").glob("trial=*"))) == 1


@pytest.mark.parametrize("damage", damages.DAMAGES)
def test_damaged_journal_is_one_line_and_stays(search, sweep, capsys, damage):
    search("random:2", "sweep")
    journal = pathlib.Path("sweep/optuna.journal")
    damaged = damages.DAMAGES[damage](journal.read_bytes())
    journal.write_bytes(damaged)
    capsys.readouterr()
    code, error = sweep("--sweep=random:2"), capsys.readouterr().err
    assert (code, error.count("\n")) in ((0, 0), (2, 1))
    assert journal.read_bytes().startswith(damaged[: damaged.rfind(b"\n") + 1 or None])


def test_run_of_a_list_has_the_values_of_the_list():
    study = optuna.create_study()
    name = sweeps.name_values({"optimizer.name": "mine.py:Adam"})
    sweeps._record(study.ask(), name, {"model.name": "mine.py:Adam"})  # of the same name
    (run,) = sweeps._resume(study, {name: {"optimizer.name": "mine.py:Adam"}})
    assert run.number == 0 and run.values == {"optimizer.name": "mine.py:Adam"}


def test_tpe_prefers_values_with_good_results(search):
    names = search("tpe:30", "sweep")
    rates = [float(name.rpartition("=")[2]) for name in names]
    assert sum(rate < 1e-3 for rate in rates[20:]) >= 8  # half of them at random
    backend = optuna.storages.journal.JournalFileBackend("sweep/optuna.journal")
    study = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend))
    assert study.best_value == min(rates)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("return {}", "get_sweep() returned a dict for a run, but must return a dict of keys"),
        ("return {'sed': 1}", "There is no config key sed: did you mean seed?"),
        ("return 1 / 0", "get_sweep() fails: experiment.py:"),
    ],
)
def test_mistake_in_get_sweep_of_a_search_is_one_line(sweep, capsys, text, message):
    function = f"\ndef get_sweep(trial):\n    {text}\n"
    experiments.write(".", {"experiment.py": experiments.CONFIG + function})
    assert sweep("--sweep=random:2") == 2
    assert message in capsys.readouterr().err


def test_missing_optuna_is_one_line(sweep, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert sweep("--sweep=seed=1") == 2
    assert "--sweep requires Optuna: pip install 'ctl-tensorflow[sweep]'" in capsys.readouterr().err


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Lists the runs of a config with a function: listed("seed=1,2", changes=[], function="")."""
    monkeypatch.chdir(tmp_path)

    def list_runs(*flags, changes=(), function=""):
        experiments.write(tmp_path, {"experiment.py": experiments.CONFIG + function})
        return sweeps.list_runs("experiment.py", list(changes), list(flags))

    return list_runs


def test_runs_are_the_product_of_the_values_in_order(listed):
    runs = listed("optimizer.learning_rate=1e-3,3e-3", "data.global_batch_size=2,4")
    assert [*runs] == [
        "learning_rate=1e-3,global_batch_size=2", "learning_rate=1e-3,global_batch_size=4",
        "learning_rate=3e-3,global_batch_size=2", "learning_rate=3e-3,global_batch_size=4",
    ]  # fmt: skip
    last = runs["learning_rate=3e-3,global_batch_size=4"]
    assert last == {"optimizer.learning_rate": "3e-3", "data.global_batch_size": "4"}


def test_values_may_contain_commas_in_brackets_and_quotes(listed):
    changes = [("optimizer.weight_decay", "0.1")]
    runs = listed("optimizer.weight_decay_exclude=['a','b'],[]", changes=changes)
    assert [*runs.values()] == [
        {"optimizer.weight_decay_exclude": "['a','b']"}, {"optimizer.weight_decay_exclude": "[]"},
    ]  # fmt: skip
    # The folder's name has no character that a shell or a file system treats specially.
    assert next(iter(runs)).startswith("weight_decay_exclude=__a_,_b__-")


def test_get_sweep_returns_lists_of_values_or_runs(listed):
    product = 'def get_sweep():\n    return {"seed": [1, 2], "eval.before_training": [True]}\n'
    names = [f"seed={seed},before_training=true" for seed in (1, 2)]
    assert [*listed("get_sweep", function=product)] == names
    runs = 'def get_sweep():\n    return [{"seed": 1}, {"seed": 5, "train.steps": 7}]\n'
    assert [*listed("get_sweep", function=runs)] == ["seed=1", "seed=5,steps=7"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["seed=1,,2"], "--sweep is 'seed=1,,2', but must be KEY=VALUE,VALUE"),
        (["seed="], "but must be KEY=VALUE,VALUE"),
        (["get_sweep", "seed=1"], "--sweep is 'get_sweep', but must be KEY=VALUE,VALUE"),
        (["optimizer.learning_rate=1e-3,-1"], "optimizer.learning_rate is -1.0, but must be a"),
        (["seed=1", "seed=2"], "--sweep names a key twice"),
        (["get_sweep"], r"has no get_sweep\(\): define one .*, such as .*\[1e-3, "),
    ],
)
def test_mistake_in_values_is_one_line(listed, flags, message):
    with pytest.raises(UsageError, match=message):
        listed(*flags)


@pytest.mark.parametrize("value", ["None", "{}", "{'seed': 5}", "[5]", "{'seed': []}"])
def test_get_sweep_must_return_settings(listed, value):
    with pytest.raises(UsageError, match=r"get_sweep\(\) .*returned "):
        listed("get_sweep", function=f"def get_sweep():\n    return {value}\n")


# The run of the sweep that is killed waits at step 15, so that it does not end before.
HOLD = """

class Hold(ctl.Action):
    at = "train"

    def __call__(self, outputs):
        # The first signal restores the default handlers (ctl/loop/stop.py).
        while "HOLD" in os.environ and self.controller.step == 15 and (
            signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            time.sleep(0.01)
"""


@pytest.mark.slow
def test_run_of_a_killed_sweep_saves_and_has_the_bits_of_a_run_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"import os, signal, time\n{experiments.DROPOUT}{HOLD}"
    experiments.write(tmp_path, {"experiment.py": text})
    flags = ["--config=experiment.py", "--config.actions=['experiment.py:Hold']"]
    sweep = ["-m", "ctl.main", *flags, "--sweep=seed=1", "--workdir=sweep"]
    process = child.start(sweep, cwd=tmp_path, HOLD="1")
    run = tmp_path / "sweep/seed=1"
    while not (run / "checkpoints/ckpt-10.index").exists() and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 240
    # The last line may not be complete yet.
    while '"stop"' not in (text := (run / "events.jsonl").read_text()) or text[-1] != "\n":
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    assert experiments.read_events(run)[-2:] == [("checkpoint", 15), ("stop", 15)]
    for command in (["--sweep=seed=1", "--workdir=sweep"], ["--config.seed=1", "--workdir=alone"]):
        assert main.run(["ctl", *flags, *command]) == 0
    weights, alone = (experiments.read_weights(each, step=30) for each in (run, "alone"))
    assert all((alone[name] == value).all() for name, value in weights.items())
