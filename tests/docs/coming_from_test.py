"""The programs in docs/coming-from run, those of the other frameworks too, on a part of MNIST."""

import re
import sys
import types

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests import child
from tests.docs import pages

FOLDER = child.ROOT / "docs/coming-from"
INDEX = (FOLDER / "index.md").read_text()
TRAINED, EVALUATED = 330, 130
SHORT = {"EPOCHS = 10": "EPOCHS = 2", "epochs=10": "epochs=2", "=200": "=4", "=100": "=2"}


@pytest.fixture(autouse=True)
def small_mnist(monkeypatch, tmp_path):
    """`load_data` of Keras, without a download, and an empty current folder."""
    parts = []
    for split, count in (("train", TRAINED), ("eval", EVALUATED)):
        rows = ctl.data.idx(child.ROOT / "experiments/data/mnist", split).gather(range(count))
        parts.append((rows["image"].numpy(), rows["label"].numpy().astype("uint8")))
    for keras in (tf.keras, tf_keras):  # two modules of the same function
        monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: tuple(parts))
    monkeypatch.chdir(tmp_path)


def run(code, name):
    """Runs a program in a module that can be imported, as a file of the reader can."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(code, name, "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tensorflow-tutorial", "keras", "orbit"])
def test_program_of_the_other_framework_runs(page, monkeypatch, capsys):
    strategy = ctl.testing.make_strategy(2)  # by default it would take all devices of this process
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    code, _ = pages.blocks(f"coming-from/{page}")
    for long, short in SHORT.items():
        code = code.replace(long, short)
    run(code, "theirs")
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("tensorflow-tutorial", "tutorial"),
        pytest.param("keras", "weighted", marks=pytest.mark.slow),
        pytest.param("model-garden", "digits", marks=pytest.mark.slow),
        pytest.param("lightning", "digits", marks=pytest.mark.slow),
    ],
)
def test_program_in_ctl_trains_and_evaluates(page, name, tmp_path):
    (tmp_path / f"{name}.py").write_text(pages.blocks(f"coming-from/{page}")[-1])
    with ctl.Run(f"{name}.py", print_lines=False) as training:
        training.train("1 epoch")
        assert training.evaluate()["examples"] == EVALUATED
        assert training.step == -(-TRAINED // 64)


def test_program_in_ctl_runs_in_orbits_controller(capsys):
    _, code = pages.blocks("coming-from/orbit")
    for long, short in SHORT.items():
        code = code.replace(long, short)
    trainer = run(code, "ours").trainer
    assert int(trainer.global_step.numpy()) == 4
    assert f"'examples': np.int64({EVALUATED})" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("sign", "-+")
def test_both_sides_of_the_diff_for_keras_3_train(sign):
    (diff,) = pages.blocks("coming-from/keras", "diff")
    code = "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign))
    (images, labels), _ = tf_keras.datasets.mnist.load_data()
    losses: list[float] = []
    names = {
        "tf": tf, "keras": tf.keras, "ctl": ctl, "images": images / 255.0, "labels": labels,
        "make": lambda: ctl.testing.make_strategy(2), "print": lambda loss: losses.append(float(loss)),
    }  # fmt: skip
    tf_keras.utils.set_random_seed(0)
    exec(code.replace("tf.distribute.MirroredStrategy", "make"), names)
    assert len(losses) >= 5 and losses[4] < losses[0]


def test_a_value_that_is_not_finite_is_skipped_on_all_replicas():
    (code,) = pages.blocks("coming-from/tf-2.15")
    run(code, "ours")


def test_numbers_of_lines_are_those_of_the_programs():
    rows = re.findall(r"\| (\d+) \| (\d+) \| \[([\w-]+)\.md\]", INDEX)
    assert len(rows) == 4
    for *counts, page in rows:
        lines = [
            sum(bool(line.strip()) and not line.strip().startswith("#") for line in b.splitlines())
            for b in pages.blocks(f"coming-from/{page}")
        ]
        assert [int(count) for count in counts] == lines, page
