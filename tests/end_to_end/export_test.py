"""A model that several processes have trained is exported once, with the weights of the evaluation."""

import json

import numpy as np
import pytest
import tensorflow as tf

import ctl
from tests import child
from tests.end_to_end.launching import launch
from tests.experiments import read_events, read_result


@pytest.mark.slow
def test_two_workers_export_the_model_that_they_have_evaluated(folder):
    arguments = [
        "--config.train.steps=20", "--config.train.export=best", "--config.eval.interval=10",
        "--config.train.best.metric=eval/loss", "--config.train.best.mode=min",
        "--config.optimizer.ema_decay=0.9",
    ]  # fmt: skip
    done = child.run(launch(folder, "exported", *arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    workdir = folder / "exported"
    result = read_result(workdir)
    step = result["best"]["step"]
    assert done.stdout.count("Exported ") == 1
    assert [event for event in read_events(workdir) if event[0] == "export"] == [("export", step)]
    assert [path.name for path in (workdir / "export").iterdir()] == [str(step)]
    version = workdir / "export" / str(step)
    assert json.loads((version / "export.json").read_text())["weights"] == "average"

    rows = ctl.data.idx(child.ROOT / "experiments/data/mnist", "eval").gather(list(range(203)))
    signature = tf.saved_model.load(version).signatures["serving_default"]
    (logits,) = signature(image=rows["image"]).values()
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(rows["label"], logits)
    assert np.mean(loss) == pytest.approx(result["best"]["value"], abs=1e-9)
