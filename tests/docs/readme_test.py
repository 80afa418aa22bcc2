"""Every command and program in README.md works, and prints what is shown."""

import re
import shlex
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main
from ctl.modes.check import CHECKS
from tests.docs.pages import blocks
from tests.support import child
from tests.support.experiments import read_result

README = (child.ROOT / "README.md").read_text()
PRECISION = (child.ROOT / "docs/precision.md").read_text()
TEST_EXAMPLES = 1_000


def commands(text):
    return [line for block in blocks(text, "sh") for line in block.splitlines()]


INSTALL = "python3 -m venv .uv && .uv/bin/pip install -q uv && .uv/bin/uv "


def test_every_command_is_run_by_a_test_or_installs():
    assert commands(README) == [
        f"{INSTALL}run ctl experiments/mnist.py",  # run in tests/end_to_end/program_test.py
        f"{INSTALL}run pytest",  # run by .ci/run
    ]
    assert f"  {INSTALL}run pytest\n" in (child.ROOT / ".ci/run").read_text()
    install = commands((child.ROOT / "docs/install.md").read_text())
    assert install[-2:] == [f"{INSTALL}sync", "source .venv/bin/activate"]


def test_first_page_is_short_and_has_each_link_once():
    words = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL).split()
    assert len(README.splitlines()) <= 100 and len(words) <= 650
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert sorted({*links}) == sorted(links)


def test_all_pages_of_the_learning_path_begin_with_the_program_of_the_first_page():
    assert blocks(README)[0] == blocks("start")[0]


def test_both_sides_of_the_diff_train():
    (diff,) = blocks(README, "diff")
    images = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    batch = {"image": images, "label": images[:, :3].argmax(axis=1)}
    entropy = tf_keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    losses = []
    for sign in "-+":
        code = "\n".join(line[1:] for line in diff.splitlines() if line[0] in f" {sign}")
        tf_keras.utils.set_random_seed(0)
        names = {
            "tf": tf, "ctl": ctl, "batches": [batch] * 10,
            "model": tf_keras.Sequential([tf_keras.layers.Dense(3, input_shape=(4,))]),
            "optimizer": tf_keras.optimizers.SGD(0.1),
            "loss_fn": lambda batch, outputs: entropy(batch["label"], outputs),
        }  # fmt: skip
        exec(code, names)
        losses.append(float(names["loss"]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """The current folder, with digits.py; Keras reads a part of the MNIST of the experiments."""
    source = ctl.data.idx(child.ROOT / "experiments/data/mnist", "eval")
    rows = source.gather(range(TEST_EXAMPLES))
    arrays = rows["image"].numpy().astype(np.uint8), rows["label"].numpy()
    monkeypatch.setattr("keras.datasets.mnist.load_data", lambda: (arrays, arrays))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(blocks(README)[0])


@pytest.mark.usefixtures("digits")
def test_first_run_trains_a_model_of_keras_3(tmp_path, capsys):
    (example,) = blocks(README)
    assert len([line for line in example.splitlines() if line]) <= 18
    assert main.run(["ctl", "digits.py", "--config.train.steps=20"]) == 0
    assert read_result(tmp_path / "runs/digits")["eval"]["examples"] == TEST_EXAMPLES
    # The labels are uint8. The comparison of replicas needs a process with several CPUs.
    checks = ",".join(each.replace(" ", "_") for each in CHECKS)
    assert main.run(["ctl", "check", "digits.py", f"--checks={checks}"]) == 0
    assert "a uniform guess among 10 classes" in capsys.readouterr().out


def test_picture_of_the_first_run_has_the_lines_that_are_printed():
    svg = (child.ROOT / "docs/images/first_run.svg").read_text()
    text = re.sub(r"<[^>]*>", " ", svg).replace("&#160;", " ")
    assert "one_device (auto: no GPU): 1 replica; global batch 64" in text
    assert re.search(
        r"eval +1000/1000 \| loss 0\.3\d+ \| accuracy 0\.9\d+ \| examples 10,000", text
    )


@pytest.mark.usefixtures("digits")
def test_explain_prints_what_the_text_promises(capsys):
    (command,) = {line for line in commands(PRECISION) if line.startswith("ctl explain")}
    assert main.run(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    for name in ("devices", "replicas", "global batch", "denominator", "reduction", "clip"):
        assert f"\n{name} " in printed


@pytest.mark.slow
@pytest.mark.long
def test_the_table_of_three_examples_is_what_the_benchmark_prints():
    measured = child.run(["-m", "benchmarks.uneven_split"])
    assert measured.returncode == 0, measured.stderr
    index = (child.ROOT / "docs/compared.md").read_text()
    table = index.split("| program | update of w | error |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 9
    for row in rows:
        assert row in measured.stdout, row


def test_the_python_versions_in_the_text_are_the_supported_ones():
    assert sys.version_info >= (3, 10)
    assert "Python 3.10 to 3.13" in (child.ROOT / "docs/install.md").read_text()
    assert 'requires-python = ">=3.10,<3.14"' in (child.ROOT / "pyproject.toml").read_text()
    assert "Python 3.10 to 3.13" in README
