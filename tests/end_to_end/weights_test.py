"""The program with weights that are not quite its own: another run's, or a part of a checkpoint."""

import json
import pathlib
import shutil

import pytest
import tf_keras

from ctl import main
from tests.support import experiments

TRAINER = experiments.DROPOUT.replace(
    "layers.Dense(3)", "layers.Dense(self.options.model.classes, name='head')"
).replace("model=dict(", "model=dict(classes=3, ")
WIDER = "--config.model.classes=5"
STEPS = "--config.train.steps={}".format


def start(workdir, *arguments):
    tf_keras.backend.reset_uids()  # names as in a process of its own
    return main.run(["ctl", "--config=experiment.py", f"--workdir={workdir}", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the experiment, and its run `old` of 10 steps."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "experiment.py").write_text(TRAINER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert start("old", STEPS(10)) == 0
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    """Runs the program in a copy of the folder; returns its exit code, stdout and stderr."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def program(workdir, *arguments):
        code = start(workdir, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return program


def events(workdir, kind):
    lines = map(json.loads, pathlib.Path(workdir, "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def model(workdir, step):
    weights = experiments.read_weights(workdir, step)
    return {name: value for name, value in weights.items() if name.startswith("model/")}


@pytest.mark.slow
def test_run_starts_from_the_weights_of_another_and_prints_so(run):
    still = "--config.optimizer.name=sgd", "--config.optimizer.learning_rate=1e-30"
    first = "--config.init.checkpoint=old", STEPS(5), "--config.seed=1", *still
    code, out, err = run("new", *first, "--config.train.checkpoint_interval=5")
    assert (code, err) == (0, "")
    line = (
        "Weights of 4 of 4 variables from old/checkpoints/ckpt-10: dense/kernel, dense/bias, "
        "head/kernel, head/bias."
    )
    assert line in out.splitlines()
    old = model("old", 10)
    assert len(old) == 4
    experiments.check_same(model("new", 5), old)
    (start,) = events("new", "start")
    assert (start["step"], start["weights_from"]) == (0, "old/checkpoints/ckpt-10")
    assert start["weights"] == ["dense/kernel", "dense/bias", "head/kernel", "head/bias"]
    assert experiments.read_weights("new", 5)["global_step/.ATTRIBUTES/VARIABLE_VALUE"] == 5

    shutil.rmtree("old")  # on resume the run's own checkpoint is the one
    code, out, _ = run("new", *first, STEPS(10))
    assert code == 0 and "Resumed from new/checkpoints/ckpt-5" in out and "Weights of" not in out
    code, _, err = run("new", STEPS(15), "--config.seed=1", *still)
    assert code == 2 and "init.checkpoint: 'old' -> ''" in err and "--allow_config_change" in err


@pytest.mark.parametrize("arguments", [[], ["--fresh"]])
def test_nothing_is_written_or_moved_if_the_weights_do_not_exist(run, arguments):
    before = sorted(pathlib.Path().rglob("*"))
    folder = "old" if arguments else "new"
    code, _, err = run(folder, "--config.init.checkpoint=nowhere", *arguments)
    assert code == 2 and err.startswith("ctl: init.checkpoint is nowhere, which does not exist")
    assert [p for p in sorted(pathlib.Path().rglob("*")) if p.name != "new"] == before
    assert not list(pathlib.Path("new").glob("*"))


@pytest.mark.slow
def test_checkpoint_that_matches_in_part_is_restored_if_allowed(run):
    changed = WIDER, STEPS(20), "--allow_config_change"
    code, _, err = run("old", *changed)
    assert code == 2 and err.count("\n") == 1
    assert "ckpt-10 does not match this trainer (head/kernel is [8, 5], but [8, 3] in " in err
    assert "--allow_partial_restore" in err
    code, out, err = run("old", *changed, "--allow_partial_restore")
    assert (code, err) == (0, "")
    assert "Restored in part: left at their initial values: head/kernel, head/bias, m/head/" in out
    (resume,) = events("old", "resume")
    slots = ["m/head/kernel", "v/head/kernel", "m/head/bias", "v/head/bias"]
    assert resume["left"] == resume["dropped"] == ["head/kernel", "head/bias", *slots]
    assert resume["step"] == 10
    code, out, _ = run("old", WIDER, STEPS(20), "--mode=eval")
    assert code == 0 and "20/20" in out
