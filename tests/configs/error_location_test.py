"""Where an error in a user's file is, in one line."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from ctl.configs.error_location import describe, error_location
from ctl.errors import UsageError

CALL = "import json\n\n\ndef f():\n    json.loads('{')\n\n\nf()\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [(CALL, "exp.py:5: JSONDecodeError: Exp"), ("x = 1\ny = (", "exp.py:2: SyntaxError: '(' was")],
)
def test_line_is_the_innermost_one_of_the_users_files(tmp_path, monkeypatch, text, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as caught:
        exec(compile(text, str(tmp_path / "exp.py"), "exec"), {})
    assert error_location(caught.value).startswith(line)


def test_error_has_its_file_its_type_and_the_first_line_of_its_message():
    error = ValueError("odd")
    assert error_location(error, pathlib.Path("net.py")) == "net.py: ValueError: odd"
    assert error_location(error) == "ValueError: odd"
    assert error_location(RuntimeError("one\ntwo")) == "RuntimeError: one"
    assert error_location(ValueError()) == "ValueError"
    assert error_location(UsageError("Set it to 0.")) == "Set it to 0."


def test_numbers_of_two_precisions_are_to_be_cast():
    with pytest.raises(Exception) as caught:
        tf.constant(1.0) - np.float64(1)[None] * tf.ones([1], tf.float64)
    line = error_location(caught.value)
    assert "Sub" in line and line.endswith("or cast it with tf.cast(x, outputs.dtype))")


def test_the_labels_of_a_batch_are_listed_up_to_the_eighth():
    text = "Received a label value of 7 which is outside the valid range of [0, 2).  Label values: "
    labels = "0 1 7 -1 0 1 0 1"
    assert describe(ValueError(text + labels)) == f"ValueError: {text}{labels}"
    longer = describe(ValueError(f"{text}{labels} 5 6 12"))
    assert longer == f"ValueError: {text}{labels} and 3 more"


KERAS = """Exception encountered when calling layer "attention" (type Attention).

in user code:

    File "/tmp/net.py", line 3, in call  *
        return inputs["key"]

    KeyError: 'key'


Call arguments received by layer "attention" (type Attention):
  - inputs=tf.Tensor(shape=(4, 2), dtype=float32)"""
KERAS_3 = """Exception encountered when calling RandomFlip.call().

\x1b[1mInput 'y' has type float32.\x1b[0m

Arguments received by RandomFlip.call():"""
GRAPH = """Graph execution error:

Detected at node Gather defined at (most recent call last):
  File "/tmp/net.py", line 3, in <module>

  File "/tmp/net.py", line 9, in per_example_loss

{{function_node __wrapped__Gather}} indices[1] = 7 is not in [0, 2)
\t [[{{node Gather}}]] [Op:__inference_loop_fn_1]"""
DATASET = """Error in user-defined function passed to MapDataset:5 transformation with iterator: \
Iterator::Root::Map: ValueError: odd
Traceback (most recent call last):

  File "/tmp/net.py", line 5, in parse
    raise ValueError("odd")"""


@pytest.mark.parametrize(
    ("text", "line"),
    [(KERAS, "KeyError: 'key' (in layer \"attention\")"),
     (GRAPH, "RuntimeError: indices[1] = 7 is not in [0, 2)"),
     (KERAS_3, "RuntimeError: Input 'y' has type float32."),
     (DATASET, "ValueError: odd"), ("x" * 500, f"RuntimeError: {'x' * 400} ...")],
    ids=["layer", "graph", "keras 3", "dataset", "long"],
)  # fmt: skip
def test_stacks_and_headers_in_a_message_of_tensorflow_are_left_out(text, line):
    assert describe(RuntimeError(text)) == line
