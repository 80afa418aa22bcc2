"""How the runs of a sweep are started, stopped and resumed; a small program stands in for ctl.main."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import pytest

import ctl
from ctl import main
from ctl.modes.sweep import runner, settings
from tests.support import child, experiments

# Ends by its seed: 1 is done, 2 fails, 3 waits to be stopped the first time.
PROGRAM = """\
import json, pathlib, signal, sys, time
values = dict(a.removeprefix("--config.").removeprefix("--").split("=", 1) for a in sys.argv[1:])
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

    def run(seeds, *, parallel=1, fresh=False, changes=()):
        runs = settings.make_runs("experiment.py", list(changes), [f"seed={seeds}"])
        command, folder = [sys.executable, "program.py"], pathlib.Path("sweep")
        folder.mkdir(exist_ok=True)
        made = runner.Runner(folder, command, runs, fresh=fresh)
        return made.run(runs, [{}] * parallel, ctl.config())

    return run


def starts(seed):
    return len(pathlib.Path(f"sweep/seed={seed}/starts").read_text())


def states():
    entries = json.loads(pathlib.Path("sweep/sweep.json").read_text())["runs"]
    return [entry["status"] for entry in entries]


def interrupt_after(*steps):
    """Sends SIGINT to this process each time that all files of a step exist."""

    def interrupt():
        for names in steps:
            while not all(pathlib.Path("sweep", name).exists() for name in names):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_table_has_a_row_per_run_and_names_the_best(sweep, capsys):
    assert sweep("1,2") == 1
    assert states() == ["done", "failed"]
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if not line.startswith(("[", "Sweep"))]
    assert table[0] == ["seed", "status", "step", "eval/loss", "seconds"]
    assert table[1] == ["1", "done", "10", "1.0000", "1.0000"]
    assert table[2][:2] == ["2", "failed"]
    assert "seed=2: ctl: no such data" in lines


def test_interrupted_sweep_stops_its_runs_and_resumes_with_those_that_are_not_done(sweep, capsys):
    assert sweep("1") == 0
    interrupt_after(["seed=3/running", "seed=4/running"])
    assert sweep("1,3,4,5", parallel=2) == 75
    assert states() == ["done", "stopped", "stopped", "waiting"]
    assert "rerun the same command to resume" in capsys.readouterr().out
    pathlib.Path("sweep/seed=5").mkdir()
    pathlib.Path("sweep/seed=5/starts").write_text("x")  # so that it does not wait
    assert sweep("1,3,4,5", parallel=3) == 0
    assert states() == ["done"] * 4
    assert (starts(1), starts(3), starts(4)) == (1, 2, 2)
    assert "Best eval/loss: 0.2000 of seed=5, 1 s." in capsys.readouterr().out


def test_second_signal_kills(sweep):
    record = '(workdir / "asked").write_text("")'
    pathlib.Path("program.py").write_text(PROGRAM.replace("sys.exit(75)", record))
    interrupt_after(["seed=3/running"], ["seed=3/asked"])
    assert sweep("3") == 75
    assert states() == ["stopped"]


def test_done_run_is_started_again_if_its_config_changes_or_with_fresh(sweep):
    assert sweep("1") == sweep("1") == 0
    assert starts(1) == 1
    assert sweep("1", changes=[("train.steps", "7")]) == 0
    assert starts(1) == 2
    assert sweep("1", changes=[("train.steps", "7")], fresh=True) == 0
    assert starts(1) == 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--sweep=seed=1,2 --sweep_parallel=0", "--sweep_parallel is '0', but must be a number"),
        ("--sweep_parallel=2", "--sweep_parallel has no effect without --sweep: remove it."),
        ("--sweep", "--sweep has no value: write --sweep=optimizer.learning_rate=1e-3,3e-3."),
        ("--sweep=seed=1 --dry_run", "--dry_run tries one run: remove --sweep, or --dry_run."),
        ("--sweep=seed=1 --mode=eval", "--sweep has no effect with --mode=eval: remove it."),
        ("--sweep=seed=1 --workdir=.", "has files in it and no sweep.json"),
        ("--sweep=tpe:2 --mode=train", "--sweep=tpe chooses values by the results of evaluations"),
        ("--sweep=tpe:2", "experiment.py has no get_sweep(): define one"),
        ("--sweep=sed=1", "There is no config key sed: did you mean seed?"),
    ],
)
def test_mistake_is_one_line_and_starts_nothing(sweep, capsys, flags, line):
    assert main.run(["ctl", "--config=experiment.py", *flags.split()]) == 2
    assert line in capsys.readouterr().err
    assert not list(pathlib.Path(".").rglob("config.json"))


# The runs of the sweep that is stopped wait at step 15, so that none of them ends before.
HELD = experiments.DROPOUT.replace(
    "    def build_metrics",
    """\
    def build_actions(self):
        return [Hold()] if "HOLD" in os.environ else []

    def build_metrics""",
).replace(
    "\n\nclass Trainer",
    """

class Hold(ctl.Action):
    at = "train"

    def __call__(self, outputs):
        # The first signal restores the default handlers (ctl/loop/stop.py).
        while self.controller.step == 15 and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            time.sleep(0.01)


class Trainer""",
)


@pytest.mark.slow
def test_stopped_and_resumed_sweep_has_the_bits_of_the_runs_by_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"import os, signal, time\n{HELD}"
    experiments.write(tmp_path, {"experiment.py": text})
    flags = ["--config=experiment.py", "--config.train.steps_per_loop=1"]
    for seed in (1, 2):
        assert main.run(["ctl", *flags, f"--config.seed={seed}", f"--workdir=alone{seed}"]) == 0
    sweep = [*flags, "--sweep=seed=1,2", "--sweep_parallel=2", "--workdir=sweep"]
    process = child.start(["-m", "ctl.main", *sweep], cwd=tmp_path, HOLD="1")
    first = tmp_path / "sweep/seed=1/checkpoints/ckpt-10.index"
    while not first.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 75
    assert main.run(["ctl", *sweep]) == 0
    for seed in (1, 2):
        weights = experiments.read_weights(tmp_path / f"sweep/seed={seed}", step=30)
        alone = experiments.read_weights(tmp_path / f"alone{seed}", step=30)
        assert all((alone[name] == value).all() for name, value in weights.items())


@pytest.mark.slow
def test_runs_of_a_killed_sweep_save_and_stop(tmp_path):
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    flags = ["--config.train.steps=1000000", "--config.eval.interval=0"]
    process = child.start(
        ["-m", "ctl.main", "--config=experiment.py", *flags, "--sweep=seed=1", "--workdir=sweep"],
        cwd=tmp_path,
    )
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
    events = experiments.read_events(run)
    assert events[-1][0] == "stop"
    assert ("checkpoint", events[-1][1]) in events  # saved at the step it stopped at
