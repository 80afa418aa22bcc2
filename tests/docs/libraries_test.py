"""The snippets of docs/with-your-libraries.md train the same on 1 and on 4 replicas, and resume.

python -m tests.docs.libraries_test Spektral         # prints what it measured, as JSON

The libraries are in the group `libraries` (BUILD.md). Each runs in a process of its own.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import re
import runpy
import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.keras import models
from tests.docs.pages import MODEL, blocks
from tests.support import child

TEXT = (child.ROOT / "docs/with-your-libraries.md").read_text()
REPLICAS = 4
BATCH = 5  # 2 + 2 + 1 + 0 rows
STEPS = 4
EXAMPLES = 20
RATE = 2**-5  # exact in float32
RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.integers(0, 3, EXAMPLES)
TARGETS = RANDOM.normal(size=(EXAMPLES, 1))
TOKENS = RANDOM.integers(1, 100, (EXAMPLES, 8))
IN_TEXT = (np.arange(8) < RANDOM.integers(3, 9, (EXAMPLES, 1))).astype(np.int64)
NODES = RANDOM.normal(size=(EXAMPLES, 6, 4))
EDGES = RANDOM.integers(0, 2, (EXAMPLES, 6, 6)) / 3
SECONDS = 1_800  # of the longest


@dataclasses.dataclass(frozen=True)
class Library:
    """One section of the page.

    Attributes:
        package: the distribution on the package index.
        features: the examples for a snippet without `build_dataset`.
        data: replaces the data of the library while the snippet is used.
        score: the loss of a snippet that trains by `ctl.Run`, by the names of the snippet.
    """

    package: str
    features: dict[str, np.ndarray] | None = None
    data: Callable[[], Any] = contextlib.nullcontext
    score: Callable[[dict[str, Any]], float] | None = None

    def is_installed(self):
        module = {"tf-models-official": "official"}.get(self.package, self.package)
        return importlib.util.find_spec(module.replace("-", "_")) is not None


# The files of the reader: a trainer, and the schema of graphs, rings of 3 to 5 atoms.
ATOMS = 'features { key: "x" value { dtype: DT_FLOAT shape { dim { size: 4 } } } }'
BONDS = '{ key: "bonds" value { source: "atoms" target: "atoms" } }'
FILES = {
    "my_model.py": MODEL,
    "graph.pbtxt": f'node_sets {{ key: "atoms" value {{ {ATOMS} }} }} edge_sets {BONDS}',
}


def graph(atoms: np.ndarray) -> bytes:
    """A ring of atoms, as TF-GNN writes it: a serialized tf.train.Example."""

    def integers(values):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    ring = range(len(atoms))
    values = tf.train.FloatList(value=atoms.reshape(-1))
    features = {
        "nodes/atoms.#size": integers([len(atoms)]),
        "nodes/atoms.x": tf.train.Feature(float_list=values),
        "edges/bonds.#size": integers([len(atoms)]),
        "edges/bonds.#source": integers(ring),
        "edges/bonds.#target": integers([(i + 1) % len(atoms) for i in ring]),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def mock_datasets():
    """Replaces the data sources of TensorFlow Datasets by random images: nothing is downloaded."""
    import tensorflow_datasets

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (EXAMPLES, 8, 8, 1), np.uint8)
    rows = [{"image": image, "label": i % 10} for i, image in enumerate(images)]
    return tensorflow_datasets.testing.mock_data(as_data_source_fn=lambda *_, **__: rows)


def train_in_two_runs(names: dict[str, Any]) -> float:
    """Trains in two runs of one workdir, which are one run of W&B; returns the loss."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with ctl.Run(names["get_config"](), folder, print_lines=False) as run:
                run.train(steps=STEPS // 2)
                loss = run.evaluate()["loss"]
        files = {path.name for path in pathlib.Path(folder).rglob("*.wandb")}
    assert len(files) == 1, files  # run-ID.wandb, in the folder of each part
    return loss


BERT = {"input_word_ids": TOKENS, "input_mask": IN_TEXT, "input_type_ids": 0 * TOKENS}
LIBRARIES = {
    "KerasHub": Library(
        "keras-hub",
        {"token_ids": TOKENS, "segment_ids": 0 * TOKENS, "padding_mask": IN_TEXT, "label": CLASSES},
    ),
    "TensorFlow Probability": Library("tensorflow-probability", {"x": NODES[:, 0]}),
    "TensorFlow Recommenders": Library(
        "tensorflow-recommenders",
        {"item": CLASSES, "user": TOKENS[:, 0] % 20, "label": CLASSES[:, None] % 2},
    ),
    "Two towers": Library("tensorflow-recommenders"),
    "TensorFlow Ranking": Library("tensorflow-ranking", {"x": NODES, "label": TOKENS[:, :6] % 3.0}),
    "Model Garden": Library("tf-models-official", {**BERT, "label": CLASSES}),
    "Spektral": Library("spektral", {"x": NODES, "a": EDGES, "label": TARGETS}),
    "TF-GNN": Library(
        "tensorflow-gnn",
        {
            "graph": np.array([graph(each[: 3 + i % 3]) for i, each in enumerate(NODES)], object),
            "label": TARGETS,
        },
    ),
    "Transformers 4": Library(
        "transformers", {"input_ids": TOKENS, "attention_mask": IN_TEXT, "label": CLASSES}
    ),
    "kapre": Library("kapre", {"x": RANDOM.normal(size=(EXAMPLES, 400, 1)), "label": CLASSES}),
    "Grain": Library("grain"),
    "TensorFlow Datasets": Library("tensorflow-datasets", data=mock_datasets),
    "Optuna": Library("optuna", score=lambda names: names["study"].best_value),
    "KerasTuner": Library(
        "keras-tuner", score=lambda names: names["tuner"].oracle.get_best_trials()[0].score
    ),
    "Weights & Biases": Library("wandb", score=train_in_two_runs),
}


def sections() -> dict[str, str]:
    """The code of each section of the page; that of KerasHub is the example of the page."""
    parts = re.split(r"^#+ (.*)\n", TEXT, flags=re.MULTILINE)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    bodies["KerasHub"] = bodies.pop("With your libraries")
    del bodies["Limits"], bodies["What ctl replaces"]
    return {name: blocks(body + "\n")[0] for name, body in bodies.items()}


def stated() -> dict[str, tuple[str, float]]:
    """What the table of the page states: the precision, and a bound of the difference."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (float\d\d), ([\d.e-]+) \|", TEXT, re.MULTILINE)
    return {re.sub(r"\[(.*?)\].*", r"\1", row[0]): (row[1], float(row[2])) for row in rows}


def test_page_has_a_row_and_a_short_snippet_of_each_library():
    code = sections()
    assert {*code} == {*stated()} == {*LIBRARIES}
    del code["Two towers"]  # a complete program
    for snippet in code.values():
        assert len(re.findall(r"^(?!import |from )\S|^ +\S", snippet, re.MULTILINE)) <= 15, snippet


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_trains_the_same_on_four_replicas_and_resumes(name, tmp_path):
    if not LIBRARIES[name].is_installed():
        pytest.skip("it is not installed: uv run --no-group cpu --group libraries")
    variables = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "WANDB_MODE": "offline"}
    command = ["-m", "tests.docs.libraries_test", name]
    process = child.run(command, cwd=tmp_path, timeout=SECONDS, **variables)
    assert process.returncode == 0, process.stderr[-5_000:]
    measured = json.loads(process.stdout.splitlines()[-1])
    assert math.isfinite(measured["loss"])
    assert measured["difference"] <= stated()[name][1], measured
    assert measured["moved"] > 1e-4
    assert measured["resumed"] == 0.0


def measure(name: str) -> dict[str, Any]:
    """Runs the snippet of a library on 1 and on 4 replicas, and once more in two parts."""
    library, (precision, _) = LIBRARIES[name], stated()[name]
    if library.score:
        measured = measure_runs(name)
    else:
        with library.data():
            trainers = [v for v in run_snippet(name).values() if isinstance(v, type)]
            (cls,) = (v for v in trainers if issubclass(v, ctl.StandardTrainer))
            measured = measure_trainer(cls, library.features, precision)
    version = importlib.metadata.version(library.package)
    return {"library": name, "version": version, **measured}


def run_snippet(name: str) -> dict[str, Any]:
    """Runs a snippet as a module, because AutoGraph reads the source of its functions."""
    for file, text in {**FILES, "snippet.py": sections()[name]}.items():
        pathlib.Path(file).write_text(text)
    return runpy.run_path("snippet.py", run_name="snippet")


def measure_trainer(cls: type, features: Any, precision: str) -> dict[str, float]:
    """Trains on 1 and on 4 replicas, and in two parts; returns the largest differences."""

    class Trainer(cls):
        if features is not None:

            def build_dataset(self, split, input_context):
                floats = {k: v for k, v in features.items() if v.dtype.kind == "f"}
                floats = {key: value.astype(precision) for key, value in floats.items()}
                return ctl.data.arrays({**features, **floats})

    def make(replicas):
        models.reset_names()
        return Trainer(
            global_batch_size=BATCH,
            strategy=ctl.testing.make_strategy(replicas),
            optimizer=functools.partial(tf_keras.optimizers.SGD, RATE, momentum=0.5),
            options=ctl.TrainerOptions(precision=precision),
        )

    def weights(trainer):
        return [np.array(each) for each in trainer.model.variables]

    one, four, stopped, resumed = make(1), make(REPLICAS), make(REPLICAS), make(REPLICAS)
    initial = weights(one)
    loss = float(one.train(tf.constant(STEPS))["loss"])
    four.train(tf.constant(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        stopped.train(tf.constant(STEPS // 2))
        checkpoints = ctl.Checkpointer(folder, stopped)
        checkpoints.save()
        checkpoints.wait()
        ctl.Checkpointer(folder, resumed).all_restore_latest()
        resumed.train(tf.constant(STEPS - STEPS // 2))
    return {
        "loss": loss,
        "moved": difference(initial, weights(one)),
        "difference": difference(weights(one), weights(four)),
        "resumed": difference(weights(four), weights(resumed)),
    }


def difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest difference of two lists of arrays."""
    assert first
    pairs = zip(first, second, strict=True)
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)


def measure_runs(name: str) -> dict[str, float]:
    """Runs a snippet that trains by `ctl.Run`, on 1 and on 4 replicas; compares the losses."""
    library, config, losses = LIBRARIES[name], ctl.config, []
    runtimes = ({"strategy": "one_device"}, {"strategy": "mirrored", "logical_devices": REPLICAS})
    for runtime in (*runtimes, runtimes[1]):
        changed = functools.partial(config, runtime={**runtime, "precision": "float64"})
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            mock.patch.object(ctl, "config", changed),
        ):
            losses.append(library.score(run_snippet(name)))
    return {
        "loss": losses[0],
        "moved": losses[0],  # a loss of 0 would compare nothing
        "difference": abs(losses[0] - losses[1]),
        "resumed": abs(losses[1] - losses[2]),
    }


def main():
    ctl.testing.split_cpu(REPLICAS)
    print(json.dumps(measure(sys.argv[1])))


if __name__ == "__main__":
    main()
