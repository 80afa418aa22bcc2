"""A summary that does not reach its file is reported; TensorFlow ignores it."""

import os

import orbit
import pytest
import tensorflow as tf

from ctl.loop.writers.tensorboard import TensorBoardWriter
from ctl.loop.writers.writer import Record


class Managers:
    """What the writer needs of a controller: Orbit's managers of the summaries below a folder."""

    def __init__(self, folder):
        step = tf.Variable(0, dtype=tf.int64)
        make = orbit.utils.SummaryManager
        self.summary_manager = make(str(folder / "train"), tf.summary.scalar, global_step=step)
        self.eval_summary_manager = make(str(folder / "eval"), tf.summary.scalar, global_step=step)


@pytest.fixture
def writer(tmp_path):
    return TensorBoardWriter(Managers(tmp_path), tmp_path)


def test_records_that_reach_their_files_print_nothing(writer, capsys):
    writer.write(Record("train", 1, {"loss": 0.5}))
    writer.write(Record("eval", 1, {"test": {"loss": 0.5}, "other": {"loss": 0.25}}))
    writer.close("FINISHED")
    assert capsys.readouterr().out == ""


def test_lost_records_are_said_once_and_counted_at_the_end(writer, tmp_path, capsys):
    writer.write(Record("train", 1, {"loss": 0.5}))
    # What is written from now on is lost.
    os.rename(tmp_path / "train", tmp_path / "gone")
    for step in (2, 3):
        writer.write(Record("train", step, {"loss": 0.5}))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"A record could not be written to {tmp_path}/train (step 2), so")
    writer.close("FINISHED")
    assert capsys.readouterr().out == f"2 records are missing in {tmp_path}.\n"
