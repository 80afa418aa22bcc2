"""The recipes run as they are written, on data that each test makes."""

import io
import itertools
import json
import math
import pathlib
import re
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import save_file
import tensorflow as tf
import tf_keras

import ctl
from ctl import main
from ctl.loop.checkpoints.warm_start import describe
from tests.docs.pages import blocks
from tests.docs.pages import run as run_page
from tests.support import child

pytestmark = pytest.mark.slow
FILES = [path for path in child.ROOT.glob("docs/recipes/*.md") if path.stem != "index"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which a recipe finds its files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(page, steps=2, workdir=None):
    """Trains a program, or that of a page, as my_model.py; returns the run and its results."""
    program = page if "\n" in page else "\n\n".join(blocks(page))
    pathlib.Path("my_model.py").write_text(program)
    with ctl.Run("my_model.py", workdir, print_lines=False) as run:
        return run, run.train(steps=steps), run.evaluate()


def test_every_recipe_is_in_the_index_and_has_a_test():
    index = (child.ROOT / "docs/recipes/index.md").read_text()
    tests = pathlib.Path(__file__).read_text()
    for file in FILES:
        page = f"recipes/{file.stem}"
        assert f"({file.name}" in index
        headings = re.findall("^## (.*)$", file.read_text(), re.MULTILINE)
        sections = {f"{page}#{each}" for each in headings if blocks(f"{page}#{each}")}
        untested = {each for each in sections if f'"{each}"' not in tests}
        assert untested == set() or f'"{page}"' in tests


def test_several_losses(folder):
    _, trained, evaluated = train("recipes/losses#Several inputs, outputs and losses")
    for results in (trained, evaluated):
        assert {"kind_accuracy", "price_error"} <= results.keys()
        total = results["kind_loss"] + 0.1 * results["price_loss"]
        assert math.isclose(results["loss"], total, rel_tol=1e-5)


def test_fine_tuning_and_its_listing(folder):
    state = {"stem.weight": np.ones((16, 8)), "stem.bias": np.zeros(16)}
    state |= {"head.weight": np.ones((10, 16)), "head.bias": np.zeros(10)}
    save_file({k: v.astype(np.float32) for k, v in state.items()}, "pretrained.safetensors")
    run, _, _ = train("recipes/fine-tuning")
    kernel = run.trainer.model.get_layer("stem").kernel.numpy()
    assert np.allclose(kernel, 1.0, atol=1e-2) and len(np.unique(kernel)) > 1
    (listing,) = blocks("recipes/fine-tuning", "text")
    lines = describe(run.trainer, run.config.init)
    assert listing.split() == ["weights:", *" ".join(lines).split()]


def test_own_images(folder):
    for split, kind in itertools.product(("train", "eval"), ("cat", "dog")):
        path = folder / "photos" / split / kind
        path.mkdir(parents=True)
        for i in range(4):
            pixels = np.random.default_rng(i).integers(0, 256, (40, 36, 3), np.uint8)
            (path / f"{i}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    assert train("recipes/images#Images in folders")[2]["examples"] == 8


def test_mixup_cutmix(folder):
    _, trained, evaluated = train("recipes/images#Mixup and CutMix")
    assert trained["loss"] > 0 and 0 <= evaluated["accuracy"] <= 1


def test_imbalanced_classes(folder):
    _, _, evaluated = train("recipes/losses#Imbalanced classes")
    assert {"auc", "pr_auc", "recall"} <= evaluated.keys()


def test_dice_and_focal_loss(folder):
    run, trained, evaluated = train("recipes/images#Dice and focal loss")
    assert trained["loss"] > 0 and 0 <= evaluated["iou"] <= 1
    names = type(run.trainer).per_example_loss.__globals__
    label = np.zeros((2, 4, 4), np.float32)
    label[0, :2] = 1
    np.testing.assert_allclose(names["dice"](label, label, smooth=0.5), [0, 0])
    np.testing.assert_allclose(names["dice"](label, 1 - label, smooth=0.5)[0], 1 - 0.5 / 16.5)
    logits = np.random.default_rng(0).normal(size=label.shape).astype(np.float32)
    options = {"apply_class_balancing": True, "from_logits": True, "reduction": "none"}
    keras_loss = tf_keras.losses.BinaryFocalCrossentropy(**options)
    expected = keras_loss(label[..., None], logits[..., None])
    np.testing.assert_allclose(names["focal"](label, logits), expected, rtol=1e-4)


def test_weight_averaging(folder):
    (program,) = blocks("optimizers#Stochastic weight averaging")
    pathlib.Path("my_model.py").write_text(program)
    weights, averages = {}, {}
    for last in (22, 31):  # it continues in a resumed run
        with ctl.Run("my_model.py", "run", print_lines=False) as run:
            while run.step < last:
                run.train(steps=1)
                weights[run.step] = run.trainer.model.get_weights()
                averages[run.step] = run.trainer.average.get_weights()
    for step, used in ((19, [19]), (22, [20]), (25, [20, 25]), (31, [20, 25, 30])):
        expected = [np.mean(values, axis=0) for values in zip(*map(weights.get, used), strict=True)]
        for value, average in zip(expected, averages[step], strict=True):
            np.testing.assert_allclose(average, value, atol=1e-6)


def test_tflite(folder):
    program, predict = blocks("export#TensorFlow Lite")
    run, _, evaluated = train(program, workdir=folder / "w")
    names = {"tf": tf}
    exec(predict, names)
    split = run.trainer.build_dataset("eval", None)._features
    outputs = names["predict"](str(folder / "w/export/2/model.tflite"), split["image"].numpy())
    right = outputs.argmax(axis=1) == split["label"].numpy()
    assert right.mean() == pytest.approx(evaluated["accuracy"], abs=1e-6)


def test_tf_serving(folder, monkeypatch):
    program, ask = blocks("export#TensorFlow Serving")
    run, _, _ = train(program, workdir=folder / "w")
    names = {}
    exec(ask, names)
    # TensorFlow Serving makes a tensor of each name of the instances, and calls the signature.
    (request,) = re.findall(r"-d '(.*?)'", "".join(blocks("export#TensorFlow Serving", "sh")))
    instances = json.loads(request)["instances"]
    features = {"x": tf.constant([each["x"] for each in instances])}
    serve = tf.saved_model.load(str(folder / "w/export/2")).signatures["serving_default"]
    asked = []

    def answer(address, body):
        asked.append((address, json.loads(body)))
        outputs = serve(**features)["outputs"].numpy().tolist()
        return io.BytesIO(json.dumps({"predictions": outputs}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    predictions = names["ask"](instances)
    address = "http://localhost:8501/v1/models/my_model:predict"
    assert asked == [(address, {"instances": instances})]
    np.testing.assert_allclose(predictions, run.trainer.model(features["x"]), atol=1e-6)


def test_segmentation(folder):
    run, _, evaluated = train("recipes/images#Segmentation")
    assert 0 < evaluated["iou"] < 1 and evaluated["loss"] > 0
    page = sys.modules[type(run.trainer).__module__]
    # The mask follows its image: here every channel is the mask, also where both are moved and flipped.
    mask = np.random.default_rng(0).integers(0, 2, (page.SIZE, page.SIZE))
    example = {"image": np.stack([mask] * 3, axis=-1).astype("u1"), "label": mask.astype("i4")}
    for seed in range(4):
        result = page.augment(example, tf.constant([seed, 1], tf.int64))
        image, label = result["image"].numpy()[..., 0], result["label"].numpy()
        counts = label != page.VOID
        assert (image[counts] == label[counts]).all() and (label != mask).any()
        assert counts.sum() >= (page.SIZE - 2) ** 2
    labels = {"label": tf.constant([[0, 1, page.VOID]])}
    for training, expected in ((True, [[1, 4, 0]]), (False, [[1, 1, 0]])):
        assert run.trainer.sample_weight(labels, training).numpy().tolist() == expected


def test_text_classification(folder):
    assert train("sequences#Text classification")[2]["examples"] == 32
    path = pathlib.Path("my_model.py")
    path.write_text(path.read_text().replace(":Reviews", ":RawReviews"))
    with ctl.Run("my_model.py", print_lines=False) as run:
        run.train(steps=2)
        texts = tf.constant(["a good film", "bad"])
        assert run.trainer.serve({"text": texts}).shape == (2, 1)


def test_language_model(folder):
    (folder / "corpus").mkdir()
    for i in range(6):
        text = "to be or not to be, that is the question " * (i + 1)
        (folder / f"corpus/{i}.txt").write_text(text)
    _, trained, _ = train("sequences#Language model")
    assert 4 < trained["loss"] < 7  # about log 257 at first


def test_transformer(folder, capsys):
    (program,) = blocks("sequences#Transformer")
    shorter = program.replace("= 512, ", "= 64, ").replace("read_bytes()", "read_bytes()[:3_000]")
    uncompiled = shorter.replace('xla="loop"', 'xla="off"')  # XLA takes half a minute
    assert program != shorter != uncompiled
    _, trained, evaluated = train(uncompiled)
    assert 4 < trained["loss"] < 7 and evaluated["loss"] > 0  # about log 256 at first
    pathlib.Path("my_model.py").write_text(program)
    assert main.run(["ctl", "explain", "my_model.py"]) == 0
    (rows,) = blocks("sequences#Transformer", "text")
    # "..." stands for rows that the page leaves out.
    assert set(rows.splitlines()) - {"..."} <= set(capsys.readouterr().out.splitlines())


def test_curriculum(folder):
    run, _, evaluated = train("recipes/losses#Curriculum")
    assert evaluated["examples"] == 64
    batch = {"difficulty": tf.constant([0.2, 0.5, 0.9])}
    for step, easy in ((0, [1, 0, 0]), (600, [1, 1, 0]), (1000, [1, 1, 1])):
        run.trainer.global_step.assign(step)
        assert run.trainer.sample_weight(batch, training=True).numpy().tolist() == easy


def test_learning_rate_after_a_resume(folder):
    program = blocks("export#TensorFlow Serving")[0]
    program = program.replace('steps=2, export="last"', "steps=20")
    pathlib.Path("digits.py").write_text(program.replace("my_model.py", "digits.py"))
    (code,) = blocks("optimizers#Change the learning rate of a run")
    exec(code, {})
    with ctl.Run("digits.py", workdir="runs/mine", print_lines=False) as run:
        run.train(steps=1)
        assert run.learning_rate == pytest.approx(1e-4) and run.step == 11


def test_logging(folder):
    run, _, evaluated = train("actions#Log images and a confusion matrix", workdir=folder / "w")
    assert run.trainer.counts.sum() == 64 and 0 <= evaluated["balanced_accuracy"] <= 1
    files = (folder / "w/summaries").glob("**/events*")
    events = itertools.chain(*(tf.compat.v1.train.summary_iterator(str(f)) for f in files))
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"confusion", "examples", "confusion (rows: labels)"} <= tags


def test_config_of_several_gpus(folder, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 28, 28), np.uint8)
    arrays = pixels, np.arange(64) % 10
    monkeypatch.setattr("keras.datasets.mnist.load_data", lambda: (arrays, arrays))
    program = blocks("start")[0]
    (folder / "digits.py").write_text(program)
    run, trained, _ = train("\n\n".join([program, blocks("hardware")[-1]]), steps=1)
    assert trained["loss"] > 0 and run.trainer.strategy.num_replicas_in_sync == 2


def test_notebook(folder):
    names = {}
    exec(blocks("running#Notebooks")[0], names)
    assert names["results"]["examples"] == 64 and names["frame"].index.tolist() == [10]
    assert names["figure"].data[0].x == (10,)


def test_nan(folder, capsys):
    program, search = blocks("recipes/nan")
    pathlib.Path("my_model.py").write_text(program)
    line = blocks("recipes/nan", "text")[0]
    message = line.removeprefix("ctl: ").removesuffix(" ...\n")
    with (
        ctl.Run("my_model.py", print_lines=False) as run,
        pytest.raises(ctl.errors.Failure, match=re.escape(message)),
    ):
        run.train(steps=8)
    names = {}
    exec(search, names)
    assert names["found"].tolist() == [17] and "[17]" in capsys.readouterr().out
    run_page("problems/nan-on-several-gpus")


def test_datasets(folder, monkeypatch):
    def load(name, split):
        """As `load_dataset` of Hugging Face, which is not installed here."""
        assert name == "ylecun/mnist" and split in ("train", "test")
        pixels = np.random.default_rng(0).integers(0, 256, (32, 28, 28), np.uint8)
        return [{"image": image, "label": i % 10} for i, image in enumerate(pixels)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert train("recipes/images#Hugging Face, TFDS and PyTorch datasets")[2]["examples"] == 32
