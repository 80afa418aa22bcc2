"""ctl.Run: the bits of the program, the history, and a learning rate that is set between calls."""

import functools
import json
import math
import operator
import pathlib
import re
import sys
import types
from unittest import mock

import numpy as np
import plotly.io
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.configs import loading, overrides
from ctl.errors import UsageError
from ctl.loop.config_changes import ConfigChanges, changes_updates
from ctl.loop.lock import RunLock
from ctl.modes import DONE, live, notebook, train
from tests.modes.shared import STOPPING
from tests.support import experiments, option_keys, reference_model

SGD = tf_keras.optimizers.SGD
KEYS = {"train.steps": 30, "train.steps_per_loop": 5, "eval.interval": 10}


@pytest.fixture
def make(make_arguments):
    """Makes a run of the tiny experiment with dropout, in the current folder."""

    def build(keys=(), workdir="run", **options):
        arguments = make_arguments(KEYS | dict(keys))
        return ctl.Run(arguments.config, workdir, print_lines=False, **options)

    make_arguments()
    return build


def read_lines(name):
    return [json.loads(line) for line in pathlib.Path(f"run/{name}.jsonl").read_text().splitlines()]


def equal(step, one, other):
    """Whether two runs have the same bits after a step."""
    one, other = (experiments.read_weights(folder, step=step) for folder in (one, other))
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.slow
def test_calls_have_the_bits_of_the_program_and_the_program_resumes_them(make, make_arguments):
    assert train.train_and_eval(make_arguments(KEYS)) == DONE
    result = experiments.read_result("run")
    with make(workdir="notebook") as run:
        run.train(steps=7)
        run.train("1 epoch")  # 50 examples in batches of 7: 8 steps
        assert run.step == 15
    with make(workdir="notebook") as run:  # as after a restart of the kernel
        assert run.step == 15
        run.train()
        assert run.step == 30 and run.evaluate() == result["eval"]
    assert equal(30, "notebook", "run")
    assert experiments.read_result("notebook")["eval"] == result["eval"]
    pathlib.Path("run").rename("first")
    pathlib.Path("notebook").rename("run")
    assert train.train_and_eval(make_arguments(KEYS | {"train.steps": 40})) == DONE
    assert experiments.read_result("run")["step"] == 40


def test_history_has_lists_of_equal_length(make):
    before = sorted(pathlib.Path(".").rglob("*"))
    run = make(workdir=None)
    folder = run._workdir.path
    run.evaluate()
    run.learning_rate = np.float32(0.5)
    run.train(steps=np.int64(20))
    history = run.history
    assert history["step"] == [0, 5, 10, 15, 20]
    assert {len(values) for values in history.values()} == {5}
    assert history["learning_rate"][1:] == [0.5] * 4
    assert [math.isnan(value) for value in history["eval/loss"][:3]] == [False, True, False]
    assert [math.isnan(value) for value in history["loss"]] == [True] + [False] * 4
    assert next(iter(history)) == "step" and {"accuracy", "eval/accuracy"} <= set(history)
    assert all(isinstance(value, int | float) for values in history.values() for value in values)
    frame = run.to_pandas()
    assert frame.index.tolist() == history["step"] and frame["loss"].isna().sum() == 1
    assert frame["eval/loss"].tolist()[-1] == history["eval/loss"][-1]
    # Without a workdir nothing is left.
    assert (folder / "result.json").exists()
    run.close()
    assert not folder.exists() and sorted(pathlib.Path(".").rglob("*")) == before


def test_plot_shows_what_all_processes_of_a_run_have_recorded(make, monkeypatch):
    run = make()
    with pytest.raises(ctl.UsageError, match="There is nothing to plot: train first"):
        run.plot()
    run.train(steps=10)
    run.close()
    run = make()
    run.train(steps=10)
    figure = run.plot()
    titles = [note.text for note in figure.layout.annotations]
    assert titles[0] == "loss" and "accuracy" in titles and "learning_rate" not in titles
    train, evaluation = (trace for trace in figure.data if trace.xaxis == "x")
    assert (train.name, train.x) == ("train", (5, 10, 15, 20))
    assert (evaluation.name, evaluation.x) == ("eval", (10, 20))
    assert evaluation.y[-1] == pytest.approx(run.history["eval/loss"][-1])
    assert [trace.showlegend for trace in figure.data] == [True] * 2 + [False] * 2
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ctl.UsageError, match=r"A figure requires the package plotly: run pip"):
            run.plot()
        with pytest.raises(ctl.UsageError, match="A data frame requires the package pandas: run"):
            run.to_pandas()


def test_live_view_is_replaced_while_a_call_trains(make, monkeypatch):
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    shown = []

    def display(bundle, *, raw, display_id=True):
        assert raw and display_id
        shown.append([bundle])
        return types.SimpleNamespace(update=lambda new, raw: shown_of(bundle).append(new))

    def shown_of(first):
        return next(bundles for bundles in shown if bundles[0] is first)

    module = types.SimpleNamespace(display=types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "plotly" or None)
    with pytest.raises(ctl.UsageError, match="live=True requires IPython: use it in a notebook"):
        make(live=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(live, "_SECONDS", -1e9)
    monkeypatch.setattr(live.time, "monotonic", lambda: 1.0)
    with make(live=True) as run:
        run.train(steps=20)
        figures, tables = shown
        steps = [bundle["application/vnd.plotly.v1+json"]["data"][0]["x"] for bundle in figures]
        assert [len(each) for each in steps[:3]] == [1, 2, 2]  # the third is that of the evaluation
        loss = f"<th>loss</th><td>{run.history['loss'][-1]:.4g}</td>"
        assert loss in tables[-1]["text/html"]
        run.train(steps=5)
        assert len(shown) == 4  # another cell


@pytest.mark.slow
def test_learning_rate_holds_in_the_resumed_run(make, make_arguments):
    with make() as run:
        run.train(steps=10)
        assert run.learning_rate == pytest.approx(1e-3)
        run.learning_rate = 0.5
        run.train(steps=20)
        rates = run.history["learning_rate"]
    assert rates == pytest.approx([1e-3] * 2 + [0.5] * 4)
    pathlib.Path("run").rename("undisturbed")
    with make() as run:
        run.train(steps=10)
        run.learning_rate = 0.5  # and then the process is killed: the checkpoint of step 10 has it
    (event,) = [e for e in read_lines("events") if e["event"] == "learning_rate"]
    assert (event["step"], event["new"]) == (10, 0.5) and event["old"] == pytest.approx(1e-3)
    assert train.train_and_eval(make_arguments(KEYS)) == DONE  # the program
    assert equal(30, "run", "undisturbed")
    steps = [line["step"] for line in read_lines("metrics") if line["split"] == "train"]
    assert steps == [5, 10, 15, 20, 25, 30]


@pytest.mark.slow
def test_learning_rate_of_a_changed_config_replaces_the_one_that_was_set(make, make_arguments):
    with make() as run:
        run.train(steps=5)
        run.learning_rate = 0.5
    keys = KEYS | {"optimizer.learning_rate": 0.25, "train.steps": 10}
    arguments = make_arguments(keys, allow_config_change=True)
    assert train.train(arguments) == DONE
    notes = json.loads(pathlib.Path("run/checkpoints/ckpt-10.whole").read_text()).get("notes", {})
    assert "learning_rate" not in notes["actions"]["LearningRate"]


def test_run_of_a_config_file_shows_its_state_and_training_beyond_its_steps(make, capsys):
    run = ctl.Run("experiment.py", workdir="run")
    assert repr(run) == "<ctl.Run: step 0 of 30, in run>"
    assert run.trainer.global_batch_size == 7
    run.train(steps=30)
    assert "beyond" not in capsys.readouterr().out
    run.train(steps=5)
    assert "Trains to step 35, beyond train.steps=30.\n" in capsys.readouterr().out
    assert re.fullmatch(r"<ctl\.Run: step 35 of 30, loss \d\.\d+, in run>", repr(run))


def test_run_of_a_trainer_records_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, other = (
        reference_model.make_trainer(
            testing.make_strategy(2), 7, optimizer=functools.partial(SGD, 0.125, momentum)
        )
        for momentum in (0.0, 0.9)
    )
    with ctl.Run(trainer, "own", print_lines=False) as run:
        assert run.train(steps=4)["loss"] > 0 and run.trainer is trainer
        assert run.evaluate()["examples"] == reference_model.EXAMPLES
        assert run.history["step"] == [4]
    saved = overrides.flatten(json.loads(pathlib.Path("own/config.json").read_text()))
    assert saved["trainer"] == "tests.support.reference_model:ReferenceTrainer"
    assert saved["data.global_batch_size"] == 7 and saved["optimizer.learning_rate"] == 0.125
    assert saved["optimizer.name"].endswith(":SGD")
    with pytest.raises(UsageError, match=r"optimizer.arguments.momentum: 0.0 -> 0.9"):
        ctl.Run(other, "own", print_lines=False)
    ctl.Run(trainer, "own", print_lines=False).close()


@functools.cache
def _trainer():
    return reference_model.make_trainer(testing.make_strategy(1), 8)


def _record(trainer, options):
    trainer.options = ctl.TrainerOptions(**options)
    return json.loads(json.dumps(notebook._wrap(trainer).config.to_dict()))


@pytest.mark.parametrize("key", option_keys.KEYS, ids=operator.attrgetter("option"))
def test_a_changed_option_of_a_trainer_is_the_change_of_a_config(monkeypatch, key):
    monkeypatch.setattr("ctl.configs.options.check_rules", lambda _: None)  # some require others
    before, after = {}, {key.option: option_keys.other_value(key)}
    options = _trainer().options
    try:
        before, after = (_record(_trainer(), options) for options in (before, after))
    finally:
        _trainer().options = options
    changes = ConfigChanges(overrides.flatten(before), after)
    expected = {"data": "data.dir", "model": "model.a", "loss_weights": "loss_weights.a"}
    name = expected.get(key.name, key.name)
    harms = changes_updates(name, after) and name != "train.on_non_finite"
    assert [*changes.lines] == [name] and changes.harmful == [name] * harms


OLDER = dict(
    seed=3, precision="float16", loss_scale=8.0, xla="gradients", kernels="off",
    allow_unkeyed_random=True, allow_row_coupling=True, compression="float16", micro_batches=2,
    clip=ctl.Clip(norm=0.5), loss_weights={"a": 2.0}, on_non_finite="skip", loss_spike=3.0,
    norms="layers", histogram_interval=10, ema_decay=0.9, weight_decay_exclude=["*bias*"], prefetch=3,
    cache="memory", data={"dir": "x"},
    optimizer_groups=[{"variables": "dense/*", "learning_rate_scale": 0.5}], model={"width": 3},
)  # fmt: skip


def test_config_that_an_older_ctl_recorded_of_the_same_options_has_no_changes():
    """Recorded when `clip` was a field, and the options were written by hand."""
    saved = json.loads((pathlib.Path(__file__).parent / "older_config.json").read_text())
    options = _trainer().options
    try:
        record = _record(_trainer(), OLDER)
    finally:
        _trainer().options = options
    del record["optimizer"]["arguments"]  # of another tf_keras
    assert ConfigChanges(overrides.flatten(saved), record).lines == {}
    saved["optimizer"]["clip"]["norm"] = 0.0
    assert [*ConfigChanges(overrides.flatten(saved), record).lines] == ["optimizer.clip.norm"]


def test_ipython_shows_one_line(make, monkeypatch, capsys):
    shown = []
    shell = types.SimpleNamespace(set_custom_exc=lambda *handler: shown.append(handler))
    hook = "def train_loop_begin(self):\n        1 / 0\n\n    def build_model"
    text = experiments.DROPOUT.replace("def build_model", hook)
    experiments.write(".", {"experiment.py": text})
    run = make()
    with pytest.raises(ZeroDivisionError):  # outside of IPython
        run.train(steps=1)
    assert not shown
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with pytest.raises(
        ctl.UsageError, match=r"experiment.py:\d+: ZeroDivisionError: .*traceback:"
    ) as e:
        run.train(steps=1)
    ((kinds, handle),) = shown
    assert isinstance(e.value, kinds)
    handle(shell, type(e.value), e.value, None, tb_offset=1)
    assert capsys.readouterr().out == f"ctl: {e.value}\n"


def test_learning_rate_must_be_a_positive_number_and_steps_a_length(make):
    run = make(workdir=None)
    for value in (0, math.nan, "fast", True):
        with pytest.raises(ctl.UsageError, match="but must be a finite number above 0"):
            run.learning_rate = value
    for steps in (-1, 1.5, True, "3", "2 hours"):
        with pytest.raises(ctl.UsageError, match=r"^steps is "):
            run.train(steps)
    run = make({"optimizer.schedule": "cosine"}, workdir=None)
    assert run.learning_rate == pytest.approx(1e-3)
    with pytest.raises(ctl.UsageError, match="is set by the optimizer's schedule"):
        run.learning_rate = 0.5


@pytest.mark.slow
def test_mistakes_are_one_line(make):
    make().train(steps=5)
    with pytest.raises(ctl.UsageError, match="holds a run with another config"):
        make({"seed": 5})
    one, other = make(), make()
    one.train(steps=5)
    with pytest.raises(ctl.UsageError, match="Another run has trained in run since"):
        other.train(steps=5)
    with pytest.raises(ctl.UsageError, match=r"There is no config file missing\.py"):
        ctl.Run("missing.py")
    config = loading.load_config("experiment.py")
    config.train.steps = -1
    with pytest.raises(ctl.UsageError, match=r"train\.steps is -1"):
        ctl.Run(config)
    with ctl.Run("experiment.py", workdir="", print_lines=False) as run:
        assert run.step == 0
    with pytest.raises(ctl.UsageError, match=r"closed.* temporary"):
        run.train(steps=1)
    with pytest.raises(ctl.UsageError, match="The run has no evaluation data"):
        make({"eval.splits": [], "eval.interval": 0}, workdir=None).evaluate()


def read(workdir):
    """The result without what depends on the machine, and the best checkpoint's folder."""
    result = experiments.read_result(workdir)
    result["best"].pop("checkpoint")
    names = ("examples_per_second", "seconds", "goodput", "versions")
    return {name: value for name, value in result.items() if name not in names}


@pytest.mark.slow
def test_early_stopping_restores_the_best_checkpoint_as_in_the_program(make, make_arguments):
    assert train.train_and_eval(make_arguments(KEYS | STOPPING)) == DONE
    with make(STOPPING, workdir="notebook") as run:
        run.train(steps=10)
        assert not run.stop_reason  # nothing has ended yet
        assert "restored" not in experiments.read_result("notebook")["best"]
        run.train()
        assert run.step == 10 and "has not improved" in run.stop_reason
        assert read("notebook") == read("run")
        best = run.evaluate()
        run.train(steps=5)
        assert run.step == 10
    # The best one, and the last one.
    assert equal(10, "run", "notebook") and equal(20, "run", "notebook")
    with make(STOPPING, workdir="notebook") as run:  # as after a restart of the kernel
        run.train()
        assert run.step == 10 and run.evaluate() == best
    assert read("notebook") == read("run")
    with make(STOPPING | {"train.best.patience": 2}, workdir="notebook") as run:
        assert run.step == 20 and not run.stop_reason
        run.train()
        assert experiments.read_result("notebook")["step"] == 30


@pytest.mark.slow
def test_training_continues_from_the_last_step_after_the_best_one_was_restored(make):
    keys = STOPPING | {"train.best.patience": 100}
    with make(workdir="plain") as run:
        run.train(steps=30)
        run.learning_rate = 0.5
        run.train(steps=10)
    with make(keys) as run:
        run.train()
        assert run.step == 10 and experiments.read_result("run")["step"] == 30
        run.learning_rate = 0.5
        run.train(steps=10)
        assert experiments.read_result("run")["step"] == 40
    assert equal(40, "run", "plain")


@pytest.mark.slow
def test_actions_end_once_and_the_keys_of_a_run_have_their_effect(make):
    calls = []

    class Ending(ctl.Action):
        def __call__(self, outputs):
            calls.append(self.controller.step)

        def end(self):
            calls.append("end")

    keys = {"eval.before_training": True, "train.profile": "5:7"}
    run = make(keys, workdir="run", actions=[Ending()])
    run.train(steps=20)
    run.train()
    assert calls == [0, 10, 20, 30, "end"]
    assert ("profile", 7) in experiments.read_events("run")


@pytest.mark.slow
def test_learning_rate_of_a_run_that_another_run_has_trained_cannot_be_set(make):
    make().train(steps=10)
    one, other = make(), make()
    other.train(steps=5)
    markers = {path: path.read_text() for path in pathlib.Path("run").rglob("*.whole")}
    assert len(markers) == 2
    with pytest.raises(ctl.UsageError, match="Another run has trained in run since"):
        one.learning_rate = 0.5
    for path in pathlib.Path("run/checkpoints").glob("ckpt-10.*"):  # as if pruned
        path.unlink()
    with pytest.raises(ctl.UsageError, match="Another run has trained in run since"):
        one.learning_rate = 0.5
    assert one.learning_rate == pytest.approx(1e-3)
    with RunLock("run") as lock:
        lock.acquire()
        with pytest.raises(ctl.UsageError, match="run is in use by another run"):
            other.learning_rate = 0.5
    assert {path: path.read_text() for path in markers if path.exists()}.items() <= markers.items()
    assert "learning_rate" not in dict(experiments.read_events("run"))


def test_several_processes_are_rejected_before_anything_is_built(make, monkeypatch):
    addresses = {"worker": ["localhost:1", "localhost:2"]}
    task = {"cluster": addresses, "task": {"type": "worker", "index": 0}}
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps(task))
        with pytest.raises(ctl.UsageError, match="in one process, but this is one of 2"):
            make()
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 7, optimizer=functools.partial(SGD, 0.1)
    )
    trainer.strategy = mock.Mock(spec=tf.distribute.MultiWorkerMirroredStrategy)
    with pytest.raises(ctl.UsageError, match="in one process, but the trainer has a"):
        ctl.Run(trainer)
