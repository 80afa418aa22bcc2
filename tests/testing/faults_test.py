"""Every fault hits where and when it says, and a run that meets it does what it promises."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from ctl.errors import NonFiniteStep
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.testing import faults
from tests import child, experiments, reference_model
from tests.experiments import read_events, read_weights

UNFINISHED = "it was not written to the end"


@pytest.fixture
def struck():
    """Looks at something whenever SIGUSR1 comes; what it saw, in order."""
    looks, seen = [], []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.extend(look() for look in looks))

    def look_at(look):
        looks.append(look)
        return seen

    yield look_at
    signal.signal(signal.SIGUSR1, before)


def trainer_of(replicas=1, *, cls=reference_model.ReferenceTrainer, **options):
    return reference_model.make_trainer(
        testing.make_strategy(replicas),
        7,
        cls=cls,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        **options,
    )


def state(trainer):
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Kills: the signal comes at the point, once, and a run that outlives it is as it would have been.


@pytest.mark.parametrize(
    ("when", "at"), [("start", 0), ("step:1", 1), ("step:13", 13), ("step:20", 20)]
)
def test_a_kill_at_a_step_comes_when_it_is_done_and_no_later(struck, when, at):
    calm, trainer = trainer_of(), trainer_of()
    seen = struck(lambda: int(trainer.global_step.numpy()))
    with faults.killing(when, by=signal.SIGUSR1):
        for _ in range(3):
            trainer.train(tf.constant(10))
    assert seen == [at]
    calm.train(tf.constant(30))
    assert trainer.global_step.numpy() == 30 and same(state(trainer), state(calm))


def test_a_run_that_begins_past_the_step_is_left_alone(struck):
    trainer = trainer_of()
    trainer.train(tf.constant(13))
    seen = struck(lambda: int(trainer.global_step.numpy()))
    with faults.killing("step:13", by=signal.SIGUSR1):
        trainer.train(tf.constant(5))
    assert seen == [] and trainer.global_step.numpy() == 18


def test_a_kill_in_a_save_comes_between_the_files_and_the_marker(struck, tmp_path):
    trainer, files = trainer_of(), CheckpointFiles(tmp_path)
    seen = struck(lambda: (files.steps(), files.faults(), sorted(tmp_path.glob("ckpt-2*"))))
    checkpoints = Checkpointer(tmp_path, trainer)
    with faults.killing("save:2", by=signal.SIGUSR1):
        for _ in range(3):
            trainer.train(tf.constant(1))
            checkpoints.save()
    written = [tmp_path / "ckpt-2.data-00000-of-00001", tmp_path / "ckpt-2.index"]
    assert seen == [([1], {2: UNFINISHED}, written)]
    assert files.steps() == [1, 2, 3]


@pytest.mark.parametrize("batches", [-1, 3])
def test_a_kill_in_an_evaluation_comes_after_its_first_batch(struck, batches):
    evaluator = ctl.StandardEvaluator(trainer_of(), global_batch_size=5)
    seen = struck(lambda: int(evaluator._examples.numpy()))
    with faults.killing("eval:2", by=signal.SIGUSR1):
        first, second = (evaluator.evaluate(tf.constant(batches)) for _ in range(2))
    assert seen == [5]
    assert int(second["examples"]) == (reference_model.EXAMPLES if batches < 0 else 15)
    assert float(second["loss"]) == float(first["loss"])


def test_none_is_no_signal_and_cuts_alike(monkeypatch):
    trainer, asked = trainer_of(), []
    train = ctl.StandardTrainer.train
    monkeypatch.setattr(
        ctl.StandardTrainer, "train", lambda self, n: (asked.append(int(n)), train(self, n))[1]
    )
    with faults.killing("step:3", by=None):
        trainer.train(tf.constant(10))
    assert asked == [3, 7]


def test_production_code_is_as_it_was_after_the_block():
    before = (
        ctl.StandardTrainer.train,
        ctl.StandardEvaluator.create_eval_loop_fn,
        CheckpointFiles.commit,
    )
    for when in ("start", "step:1", "save:1", "eval:1"):
        with faults.killing(when):
            now = (
                ctl.StandardTrainer.train,
                ctl.StandardEvaluator.create_eval_loop_fn,
                CheckpointFiles.commit,
            )
            assert now != before
    now = (
        ctl.StandardTrainer.train,
        ctl.StandardEvaluator.create_eval_loop_fn,
        CheckpointFiles.commit,
    )
    assert now == before


@pytest.mark.parametrize("when", ["step", "step:0", "step:-1", "start:1", "stop:3", "save:x", ""])
def test_a_point_that_is_none_is_told(when):
    with pytest.raises(ctl.UsageError, match="start, step:K, save:N, eval:N"), faults.killing(when):
        pass


EXPERIMENT = experiments.DROPOUT.replace(
    "eval=dict(interval=15)", "eval=dict(interval=15, global_batch_size=7)"
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of an experiment, and in it the run `calm` that nobody disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "experiment.py").write_text(EXPERIMENT)
    done = child.run(["-m", "ctl.main", "--config=experiment.py", "--workdir=calm"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def check_same(folder, name, step=30):
    want, got = read_weights(folder / "calm", step), read_weights(folder / name, step)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[key], want[key]) for key in want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "happened", "newest"),
    [
        ("start", [("start", 0)], 0),
        ("step:13", [("start", 0), ("checkpoint", 10)], 10),
        # Its event follows its marker where it is not written in the background.
        ("save:2", [("start", 0), ("checkpoint", 10), ("eval", 15)], 10),
        ("eval:1", [("start", 0), ("checkpoint", 10)], 10),
    ],
)
def test_the_program_dies_there_and_goes_on_to_the_same_bits(calm, when, happened, newest):
    name = when.replace(":", "-")
    run = [
        "--config=experiment.py",
        f"--workdir={name}",
        "--config.train.checkpoint_writing=blocking",
    ]
    killed = child.run(["-m", "ctl.testing.faults", f"--kill={when}", "--", *run], cwd=calm)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert read_events(calm / name) == happened
    assert max(CheckpointFiles(calm / name / "checkpoints").steps(), default=0) == newest
    again = child.run(["-m", "ctl.main", *run], cwd=calm)
    assert again.returncode == 0 and ("Resumed from" in again.stdout) == bool(newest), again.stderr
    check_same(calm, name)


@pytest.mark.slow
def test_a_sigterm_at_a_step_ends_in_a_checkpoint_of_its_inner_loop(calm):
    run = ["--config=experiment.py", "--workdir=term"]
    command = ["-m", "ctl.testing.faults", "--kill=step:13", "--signal=SIGTERM", "--", *run]
    stopped = child.run(command, cwd=calm)
    assert stopped.returncode == 75, stopped.stderr
    assert read_events(calm / "term")[-2:] == [("checkpoint", 15), ("stop", 15)]
    assert child.run(["-m", "ctl.main", *run], cwd=calm).returncode == 0
    check_same(calm, "term")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kill=stop:3", "--", "--config=x.py"], "A kill at 'stop:3'"),
        (["--kill=start"], "There is nothing to run"),
        (["--kill=start", "--workers=2", "--worker=2", "--", "--config=x.py"], "--worker is 2"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(capsys, arguments, told):
    from ctl.testing.faults import __main__ as program

    assert program.main(["faults", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


# Damage: the run goes on from the newest whole checkpoint, says so, and ends with the same bits.

DAMAGES = {
    "data cut": (lambda f: faults.truncate(f, 30), "has 100 bytes, not"),
    "index cut": (lambda f: faults.truncate(f, 30, "index", keep=0), "has 0 bytes, not"),
    "marker cut": (lambda f: faults.truncate(f, 30, "marker", keep=9), "its marker cannot be read"),
    "data gone": (lambda f: faults.delete(f, 30), "ckpt-30.data-00000-of-00001 is missing"),
    "index gone": (lambda f: faults.delete(f, 30, "index"), "ckpt-30.index is missing"),
    "marker gone": (lambda f: faults.delete(f, 30, "marker"), UNFINISHED),
    "data flipped": (lambda f: faults.flip(f, 30), "hecksum"),
    "index flipped": (lambda f: faults.flip(f, 30, "index"), "hecksum"),
    "marker flipped": (lambda f: faults.flip(f, 30, "marker"), "its marker cannot be read"),
    "one unfinished": (lambda f: faults.leave_unfinished(f, 40), UNFINISHED),
}


@pytest.fixture(scope="module")
def longer(calm):
    """The run that nobody disturbed, to step 35."""
    shutil.copytree(calm / "calm", calm / "longer")
    done = child.run(
        ["-m", "ctl.main", "--config=experiment.py", "--workdir=longer", "--config.train.steps=35"],
        cwd=calm,
    )
    assert done.returncode == 0, done.stderr
    return read_weights(calm / "longer", 35)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_told(calm, longer, kind, monkeypatch, capsys):
    damage, fault = DAMAGES[kind]
    workdir = pathlib.Path(kind.replace(" ", "-"))
    monkeypatch.chdir(calm)
    shutil.copytree("calm", workdir)
    damage(workdir / "checkpoints")
    code = main.run(
        ["ctl", "--config=experiment.py", f"--workdir={workdir}", "--config.train.steps=35"]
    )
    out, _ = capsys.readouterr()
    assert code == 0, out
    damaged, newest = (40, 30) if kind == "one unfinished" else (30, 20)
    (passed,) = [line for line in out.splitlines() if line.startswith("Passed over")]
    assert passed.startswith(f"Passed over {workdir}/checkpoints/ckpt-{damaged}: ")
    assert fault in passed
    assert f"Resumed from {workdir}/checkpoints/ckpt-{newest}." in out
    found = read_weights(workdir, 35)
    assert all(np.array_equal(found[name], longer[name]) for name in longer)


def test_bytes_that_are_flipped_twice_are_as_they_were(calm, tmp_path):
    folder = shutil.copytree(calm / "calm/checkpoints", tmp_path / "checkpoints")
    path = next(folder.glob("ckpt-20.data*"))
    before = path.read_bytes()
    assert faults.flip(folder, 20, at=3, count=2) == path
    changed = [
        i for i, pair in enumerate(zip(before, path.read_bytes(), strict=True)) if len({*pair}) > 1
    ]
    assert changed == [3, 4]
    faults.flip(folder, 20, at=3, count=2)
    assert path.read_bytes() == before


def test_damage_that_cannot_be_done_is_told(calm):
    folder = calm / "calm/checkpoints"
    with pytest.raises(ctl.UsageError, match="ckpt-7 has no index file"):
        faults.delete(folder, 7, "index")
    with pytest.raises(ctl.UsageError, match="part is 'body'"):
        faults.delete(folder, 20, "body")
    with pytest.raises(ctl.UsageError, match="want keep to be less"):
        faults.truncate(folder, 20, "marker", keep=10_000)
    with pytest.raises(ctl.UsageError, match="want 1 from 10000"):
        faults.flip(folder, 20, "marker", at=10_000)
    assert CheckpointFiles(folder).steps() == [10, 20, 30]


# Poison.


def test_poison_is_in_the_examples_named_and_in_no_others():
    whole = reference_model.examples()
    source = faults.poisoned(ctl.data.arrays(whole), [3, 17], "x")
    found = source.gather(tf.range(reference_model.EXAMPLES, dtype=tf.int64))
    assert isinstance(source, ctl.data.Arrays)
    bad = np.isnan(found["x"].numpy())
    assert bad[[3, 17]].all() and not np.delete(bad, [3, 17], axis=0).any()
    kept = np.delete(found["x"].numpy(), [3, 17], axis=0)
    assert np.array_equal(kept, np.delete(whole["x"], [3, 17], axis=0))
    assert np.array_equal(found["label"], whole["label"])


class Streamed(ctl.data.Source):
    """Examples of a person's own source."""

    def __len__(self):
        return reference_model.EXAMPLES

    def gather(self, indexes):
        return ctl.data.arrays(reference_model.examples()).gather(indexes)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_example_of_a_replica_spoils_that_step_on_any_replicas(replicas, streamed):
    example = faults.example_on(trainer_of(4), step=2, replica=3)
    plain = Streamed() if streamed else ctl.data.arrays(reference_model.examples())

    class Poisoned(reference_model.ReferenceTrainer):
        data_factory = staticmethod(lambda split: faults.poisoned(plain, [example], "x"))

    trainer = trainer_of(replicas, cls=Poisoned)
    with pytest.raises(NonFiniteStep) as raised:
        trainer.train(tf.constant(3))
    assert raised.value.step == 2


def test_a_replicas_example_is_the_one_that_it_reads():
    trainer = trainer_of(4)  # rows 2, 2, 2, 1
    read = trainer.feed.example_indexes(7, 5)
    found = [
        faults.example_on(trainer, step=5, replica=r, row=i)
        for r in range(4)
        for i in range(2 - (r == 3))
    ]
    assert found == read
    with pytest.raises(ctl.UsageError, match=r"Row 1 of replica 3.*\[2, 2, 2, 1\]"):
        faults.example_on(trainer, step=5, replica=3, row=1)


def test_a_step_is_poisoned_on_the_replica_named_alone():
    def step(now):
        with ctl.replica.examples(step=tf.constant(now, tf.int64)):
            batch = {"x": tf.ones([2, 3]), "label": tf.zeros([2], tf.int64)}
            return faults.poisoned_step(batch, "x", step=5, replica=1)["x"]

    four = testing.make_strategy(4)
    for now in (4, 5, 6):
        found = four.experimental_local_results(four.run(tf.function(step), args=(now,)))
        bad = [bool(tf.reduce_all(tf.math.is_nan(x))) for x in found]
        assert bad == [now == 5 and replica == 1 for replica in range(4)]


class PoisonedOnce(reference_model.ReferenceTrainer):
    def forward(self, batch, training):
        if training:
            batch = faults.poisoned_step(batch, "x", step=5, replica=0)
        return super().forward(batch, training)


@pytest.mark.parametrize("xla", ["off", "gradients", "step", "loop"])
def test_a_poisoned_step_is_that_step_in_every_mode_of_xla(xla):
    trainer = trainer_of(cls=PoisonedOnce, xla=xla)
    trainer.train(tf.constant(5))
    with pytest.raises(NonFiniteStep) as raised:
        trainer.train(tf.constant(5))
    assert raised.value.step == 5


def test_a_poisoned_step_is_left_out_by_skip_and_evaluation_is_clean():
    trainer = trainer_of(2, cls=PoisonedOnce, on_non_finite="skip")
    trainer.train(tf.constant(5))
    loss = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))["loss"]  # at step 5
    assert np.isfinite(float(loss))
    trainer.train(tf.constant(5))
    assert (trainer.skipped_steps.numpy(), trainer.global_step.numpy()) == (1, 10)


def test_poison_that_would_not_be_there_is_told():
    source = ctl.data.arrays(reference_model.examples())
    with pytest.raises(ctl.UsageError, match=r"'label' is to be poisoned.*'x', 'weight'"):
        faults.poisoned(source, [1], "label")
    with pytest.raises(ctl.UsageError, match="want 0 to 22"):
        faults.poisoned(source, [23], "x")

    class Elsewhere(reference_model.ReferenceTrainer):
        def forward(self, batch, training):
            batch = faults.poisoned_step(batch, "x", step=1, replica=2)
            return super().forward(batch, training)

    with pytest.raises(ctl.UsageError, match="Replica 2 is to be poisoned: want 0 to 1"):
        trainer_of(2, cls=Elsewhere).train(tf.constant(1))


# Workers.

LAUNCHER = """
import json, os, subprocess, sys
for index in range(2):
    config = json.dumps({"task": {"type": "worker", "index": index}})
    subprocess.Popen(["sleep", "60"], env={**os.environ, "TF_CONFIG": config})
subprocess.Popen(["sleep", "60"])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher():
    """The pid of a process that started two workers and something else."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "started\n"
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def status(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_workers_are_found_by_their_names_and_dropped(launcher):
    found = faults.workers(launcher)
    assert list(found) == ["worker 0", "worker 1"] and len({*found.values()}) == 2
    assert faults.drop(launcher, "worker 1") == found["worker 1"]
    time.sleep(0.2)
    assert status(found["worker 1"]) == "Z" and status(found["worker 0"]) == "S"
    assert faults.workers(launcher) == {"worker 0": found["worker 0"]}
    with pytest.raises(ctl.UsageError, match=r"no 'worker 1' among .*: worker 0\."):
        faults.drop(launcher, "worker 1")
    assert faults.workers(os.getpid()) == {}


def test_a_delayed_worker_stands_still_and_goes_on(launcher):
    pid = faults.workers(launcher)["worker 0"]
    delay = threading.Thread(
        target=faults.delay, args=(launcher, "worker 0"), kwargs={"seconds": 1}
    )
    delay.start()
    time.sleep(0.5)
    assert status(pid) == "T"
    delay.join()
    assert status(pid) == "S"


WORKERS = """
import experiment

def get_config():
    config = experiment.get_config()
    config.train.update(steps=60, steps_per_loop=2, checkpoint_interval=10)
    return config
"""


@pytest.fixture(scope="module")
def two_workers(calm):
    (calm / "workers.py").write_text(WORKERS)
    run = ["--config=workers.py", "--mode=train"]
    done = child.run(["-m", "ctl.launch", "--workers=2", "--", *run, "--workdir=two"], cwd=calm)
    assert done.returncode == 0, done.stdout + done.stderr
    return calm, run, read_weights(calm / "two", 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_at_a_step_is_started_again_without_the_kill(two_workers):
    folder, run, want = two_workers
    kill = ["--kill=step:33", "--workers=2", "--worker=1", "--max_restarts=1"]
    done = child.run(
        ["-m", "ctl.testing.faults", *kill, "--", *run, "--workdir=restarted"], cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 failed first (killed by SIGKILL)" in done.stderr
    assert "Resumed from restarted/checkpoints/ckpt-30." in done.stdout
    found = read_weights(folder / "restarted", 60)
    assert all(np.array_equal(found[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_delayed_worker_holds_all_up_and_changes_nothing(two_workers):
    folder, run, want = two_workers
    command = ["-m", "ctl.launch", "--workers=2", "--", *run, "--workdir=delayed"]
    with child.start(command, cwd=folder) as launcher:
        wait_for_checkpoint(launcher, folder / "delayed")
        faults.delay(launcher.pid, "worker 1", seconds=3)
        out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, out + err
    lines = (folder / "delayed/events.jsonl").read_text().splitlines()
    times = [line["time"] for line in map(json.loads, lines) if line["event"] == "checkpoint"]
    assert 2.5 < np.diff(times).max() < 10
    found = read_weights(folder / "delayed", 60)
    assert all(np.array_equal(found[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dropped_worker_ends_the_launcher_with_its_code(two_workers):
    folder, run, _ = two_workers
    command = ["-m", "ctl.launch", "--workers=2", "--", *run, "--workdir=dropped"]
    with child.start(command, cwd=folder) as launcher:
        wait_for_checkpoint(launcher, folder / "dropped")
        faults.drop(launcher.pid, "worker 1")
        _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "worker 1 failed first (killed by SIGKILL)" in err


def wait_for_checkpoint(launcher, workdir):
    end = time.monotonic() + 120
    while not CheckpointFiles(workdir / "checkpoints").steps():
        assert launcher.poll() is None and time.monotonic() < end, launcher.communicate()
        time.sleep(0.01)


def test_damage_and_workers_load_no_tensorflow():
    program = (
        "import sys; from ctl.testing import faults; faults.flip, faults.drop; "
        "assert not [name for name in sys.modules if name.startswith('tensorflow')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=child.ROOT)
