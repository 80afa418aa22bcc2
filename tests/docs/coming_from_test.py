"""The programs in docs/coming-from run, those of the other frameworks too, on a part of MNIST."""

import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.docs import pages
from tests.support import child

pytestmark = pytest.mark.slow
FOLDER = child.ROOT / "docs/coming-from"
INDEX = (child.ROOT / "docs/compared.md").read_text()
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


def shortened(code, changes=SHORT):
    for long, short in changes.items():
        code = code.replace(long, short)
    return code


@pytest.mark.parametrize("page", ["tensorflow-tutorial", "keras", "orbit"])
def test_program_of_the_other_framework_runs(page, monkeypatch, capsys):
    strategy = ctl.testing.make_strategy(2)  # by default it would take all devices of this process
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    run(shortened(pages.blocks(f"coming-from/{page}")[0]), "theirs")
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "name"),
    {
        "tensorflow-tutorial": "tutorial", "keras": "weighted", "model-garden": "digits",
        "lightning": "digits",
    }.items(),
)  # fmt: skip
def test_program_in_ctl_trains_and_evaluates(page, name, tmp_path):
    (tmp_path / f"{name}.py").write_text(pages.blocks(f"coming-from/{page}")[-1])
    with ctl.Run(f"{name}.py", print_lines=False) as training:
        training.train("1 epoch")
        assert training.evaluate()["examples"] == EVALUATED
        assert training.step == -(-TRAINED // 64)


def test_program_in_ctl_runs_in_orbits_controller(capsys):
    trainer = run(shortened(pages.blocks("coming-from/orbit")[1]), "ours").trainer
    assert int(trainer.global_step.numpy()) == 4
    assert f"'examples': np.int64({EVALUATED})" in capsys.readouterr().out


@pytest.mark.parametrize("sign", "-+")
def test_both_sides_of_the_diff_for_keras_3_train(sign):
    diff = pages.blocks("coming-from/keras", "diff")[0]
    code = side(diff, sign)
    (images, labels), _ = tf_keras.datasets.mnist.load_data()
    losses: list[float] = []
    names = {
        "tf": tf, "keras": tf.keras, "ctl": ctl, "images": images / 255.0, "labels": labels,
        "make": lambda: ctl.testing.make_strategy(2), "print": lambda loss: losses.append(float(loss)),
    }  # fmt: skip
    tf_keras.utils.set_random_seed(0)
    exec(code.replace("tf.distribute.MirroredStrategy", "make"), names)
    assert len(losses) >= 5 and losses[4] < losses[0]


def test_numbers_of_lines_are_those_of_the_programs():
    rows = re.findall(r"\| (\d+) \| (\d+) \| \[([\w-]+)\.md\]", INDEX)
    assert len(rows) == 4
    for *counts, page in rows:
        lines = [
            sum(bool(line.strip()) and not line.strip().startswith("#") for line in b.splitlines())
            for b in pages.blocks(f"coming-from/{page}")
        ]
        assert [int(count) for count in counts] == lines, page


# The diffs from the loops of other frameworks to ctl.Step.

ROWS, BATCH = 27, 6  # the last batch has 3 rows
SMALL = {
    "64 * strategy.num_replicas_in_sync": f"{BATCH}", "tf.keras": "tf_keras", "64": f"{BATCH}",
    "import tensorflow as tf\n": "import tensorflow as tf\nimport tf_keras\n",
    "EPOCHS = 10": "EPOCHS = 2", "epochs=10": "epochs=2", "=200": "=10", "=100": "=5",
    "callbacks=callbacks": "callbacks=callbacks, shuffle=False",
}  # fmt: skip


def side(diff, sign):
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def on_replicas(code, replicas):
    strategy = (
        f"ctl.testing.make_strategy({replicas})" if replicas > 1 else "tf.distribute.get_strategy()"
    )
    return code.replace("tf.distribute.MirroredStrategy()", strategy)


def patched(page):
    """The first program of a page after its last diff, and the lines that have no place in it."""
    program, end = pages.blocks(f"coming-from/{page}")[0], ""
    for hunk in pages.blocks(f"coming-from/{page}", "diff")[-1].split("@@\n"):
        old, new = side(hunk, "-"), side(hunk, "+")
        if not old.strip():
            end = new
            continue
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    # Every run must see the same order.
    shuffle = r"\.shuffle\(len\(\w+\)\)"
    return [shortened(re.sub(shuffle, "", part), SMALL) for part in (program, end)]


def run_task(program, end, strategy):
    """Runs a task as Model Garden's trainer does, without `official.core`."""
    core = types.ModuleType("official.core")
    core.base_task = types.SimpleNamespace(Task=type("Task", (tf.Module,), {"loss": "loss"}))
    core.config_definitions = types.SimpleNamespace(TaskConfig=object, DataConfig=object)
    core.task_factory = types.SimpleNamespace(register_task_cls=lambda config: lambda task: task)
    sys.modules.update({"official": types.ModuleType("official"), "official.core": core})
    try:
        names = vars(run(program, "theirs"))
    finally:
        del sys.modules["official"], sys.modules["official.core"]
    task = names["DigitsTask"]()
    params = types.SimpleNamespace(is_training=True, global_batch_size=BATCH)
    data = strategy.experimental_distribute_dataset(task.build_inputs(params))
    with strategy.scope():
        model, optimizer = task.build_model(), tf_keras.optimizers.Adam(1e-3)
    trainer = types.SimpleNamespace(train_dataset=data)
    names |= {"task": task, "model": model, "optimizer": optimizer, "strategy": strategy}
    exec(end, names | {"trainer": trainer})

    @tf.function
    def train(inputs):
        strategy.run(lambda rows: task.train_step(rows, model, optimizer), args=(inputs,))

    iterator = iter(data)
    for _ in range(10):
        train(next(iterator))
    return model


def run_diff(page, replicas):
    tf_keras.utils.set_random_seed(0)
    program, end = patched(page)
    if page == "model-garden":
        strategy = eval(on_replicas("tf.distribute.MirroredStrategy()", replicas))
        return run_task(program, end, strategy)
    names = vars(run(on_replicas(program, replicas), "theirs"))
    return names["trainer"].model if page == "orbit" else names["model"]


@pytest.fixture
def few_rows_in_float64(monkeypatch):
    images = np.random.default_rng(0).integers(0, 255, size=(ROWS, 28, 28))
    both = [(images, np.arange(ROWS) % 10)] * 2
    monkeypatch.setattr(tf_keras.datasets.mnist, "load_data", lambda: both)
    tf_keras.backend.set_floatx("float64")
    yield
    tf_keras.backend.set_floatx("float32")


def assert_trains_as_one_device(train, replicas):
    """6 rows on 4 replicas are 2 + 2 + 2 + 0 or 2 + 2 + 1 + 1, and the last 3 are 1 + 1 + 1 + 0."""
    one, several = (train(count).get_weights() for count in (1, replicas))
    assert np.abs(one[0]).max() > 0
    for value, expected in zip(several, one, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("page", ["tensorflow-tutorial", "keras", "orbit", "model-garden"])
def test_program_after_the_diff_trains_as_one_device(
    page, monkeypatch, few_rows_in_float64, tmp_path
):
    def train(replicas):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        monkeypatch.chdir(folder)  # checkpoints of fit
        return run_diff(page, replicas)

    assert_trains_as_one_device(train, 2)


@pytest.mark.parametrize("position", [0, 1])
def test_loop_of_pytorch_after_the_diff_trains_as_one_device(position):
    code = side(pages.blocks("coming-from/lightning", "diff")[position], "+")
    options = {"strategy=strategy,": 'strategy=strategy, precision="float64",', "=4": "=2"}
    code = shortened(code, {"64": f"{BATCH}", 'precision="bfloat16", ': "", **options})
    rows = np.random.default_rng(0)
    source = ctl.data.arrays({"image": rows.normal(size=(ROWS, 4)), "label": np.arange(ROWS) % 3})

    def train(replicas):
        strategy = eval(on_replicas("tf.distribute.MirroredStrategy()", replicas))
        layers, entropy = tf_keras.layers, tf.nn.sparse_softmax_cross_entropy_with_logits
        names = {
            "ctl": ctl, "tf": tf, "strategy": strategy, "source": source, "steps": 10,
            "make_model": lambda: tf_keras.Sequential([layers.Dropout(0.2), layers.Dense(3)]),
            "make_optimizer": lambda: tf_keras.optimizers.Adam(1e-2),
            "loss_fn": lambda batch, outputs: entropy(batch["label"], outputs),
        }  # fmt: skip
        exec(on_replicas(code, replicas), names)
        return names["step"].model

    assert_trains_as_one_device(train, 4)


def test_a_diff_changes_at_most_ten_lines():
    for page in ("tensorflow-tutorial", "keras", "orbit", "model-garden", "lightning"):
        for diff in pages.blocks(f"coming-from/{page}", "diff")[page == "keras" :]:
            lines = [line for line in diff.splitlines() if line[1:].strip()]
            assert max(sum(line[0] == sign for line in lines) for sign in "-+") <= 10, page
