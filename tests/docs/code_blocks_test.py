"""The code blocks of the other pages run, with the names that their texts assume."""

import re

import optuna
import orbit
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.configs import validation
from tests.docs.pages import MODEL, blocks, run
from tests.support import child

# The pages whose blocks run in the test modules next to this one.
ELSEWHERE = {"testing", "start", "your-model", "your-step", "random", "loss"}


def test_every_page_with_code_is_run_by_a_test():
    pages = {path.stem for path in child.ROOT.glob("docs/*.md") if blocks(path.stem)}
    tests = "\n".join(path.read_text() for path in child.ROOT.glob("tests/docs/*.py"))
    unknown = {page for page in pages - ELSEWHERE if not re.search(f'"{page}["#]', tests)}
    unknown = {page for page in unknown if f"docs/{page}.md" not in tests}
    assert unknown == set()


SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in ("update", "your-part")]


@pytest.mark.parametrize("page", ["data", "evaluation", "export", *SLOW])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run(page, WORKDIR=tmp_path)


def test_blocks_of_sequences():
    text = (child.ROOT / "docs/sequences.md").read_text()
    run(text.partition("## Text classification")[0])  # the programs after it are in recipes_test.py


def test_blocks_of_actions():
    config = ctl.config(trainer="my_model.py:MyTrainer")
    names = run("actions", ctl=ctl, tf=tf, orbit=orbit, tf_keras=tf_keras, config=config)
    ctl.KerasCallback(names["Print"]())
    stop, best = names["Digits"].build_actions(None)
    assert isinstance(stop, names["StopWhenGood"]) and best.at == "eval"
    assert len(config.actions) == 2
    assert ctl.config(trainer="my_model.py:MyTrainer", train=names["train"]).train.best.mode


def test_blocks_of_optimizers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(MODEL)
    config = {"optimizer": {"ema_decay": 0.9}, "data": {"global_batch_size": 8}}
    with ctl.Run(
        ctl.config(trainer="digits.py:MyTrainer", **config), print_lines=False
    ) as training:
        training.train(steps=1)
        trainer = training.trainer
        names = run("optimizers", ctl=ctl, trainer=trainer, MyWrapper=lambda optimizer: optimizer)
        assert (tmp_path / "averaged.h5").exists()
    made = names["MyTrainer"].build_optimizer(None, tf_keras.optimizers.SGD)
    assert isinstance(made, tf_keras.optimizers.SGD)
    sections = [block for block in blocks("optimizers") if block.startswith("optimizer = dict(")]
    for section, name in zip(sections, ("adamw", "sgd"), strict=True):
        exec(section, names)
        data = dict(global_batch_size=8)
        checked = ctl.config(trainer="a.py:A", data=data, optimizer=names["optimizer"])
        validation.check_config(checked)
        assert checked.optimizer.name == name


def test_sweeps_of_running():
    grid, search = blocks("running#Sweeps")
    names = {}
    exec(grid, names)
    assert set(names["get_sweep"]()) == {"optimizer.learning_rate", "seed"}
    exec(search, names)
    (value,) = names["get_sweep"](optuna.create_study().ask()).values()
    assert 1e-4 <= value <= 1e-2


@pytest.mark.slow
def test_blocks_of_notebook_and_observing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(MODEL)
    names = {"ctl": ctl}
    exec(blocks("running#Notebooks")[1], names)
    assert names["run"].step == 502 and len(names["frame"])
    (tmp_path / "runs/notebook").rename(tmp_path / "runs/mnist")
    assert run("observing")["frame"]["step"].iloc[-1] == 502
