"""The code blocks of a page of the documentation."""

import re
import textwrap

from tests.support import child

# A program of the reader, whose trainer the examples name.
MODEL = """
import ctl
import numpy as np
import tensorflow as tf
import tf_keras

X = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")


class MyTrainer(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": X.sum(axis=1, keepdims=True)})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.mse(batch["label"], outputs)


def get_config():
    return ctl.config(trainer="digits.py:MyTrainer", data=dict(global_batch_size=64))
"""


def blocks(page, language="python"):
    """The code blocks of docs/`page`.md, of its section `page#heading`, or of a longer text."""
    path, _, heading = page.partition("#")
    text = page if "\n" in page else (child.ROOT / f"docs/{path}.md").read_text()
    if "\n" not in page and heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    matches = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in matches]  # the blocks of a tab are indented


def run(page, **names):
    """Runs all blocks of a page as one program; returns its names."""
    code = "\n\n".join(blocks(page))
    assert code
    exec(compile(code, f"docs/{page}.md, all blocks", "exec"), names)  # not the name of a file
    return names
