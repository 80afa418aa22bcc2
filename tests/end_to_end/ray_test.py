"""Ray starts a run, which continues with the same bits after a kill, if it is installed."""

import json
import os
import pathlib
import shutil
import signal

import pytest

from tests.docs.pages import blocks
from tests.end_to_end.paused_run import Folder
from tests.support import child, experiments

pytestmark = pytest.mark.slow

# After the block of docs/clusters.md.
RAY = """
import json
import pathlib

files = sorted(path.name for path in pathlib.Path(result.checkpoint.path).rglob("ckpt-*"))
train = dict(metrics=result.metrics, files=files, step=result.return_value["step"])
best = results.get_best_result("eval/accuracy", "max").metrics["eval/accuracy"]
tune = dict(errors=results.num_errors, steps=[trial.metrics["step"] for trial in results], best=best)
pathlib.Path("outcome.json").write_text(json.dumps([train, tune]))
"""


def test_ray_restarts_a_killed_worker_and_the_run_has_the_same_bits(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: see BUILD.md")
    # Not below pytest's folder, whose path is too long for the sockets of Ray.
    temporary = pathlib.Path(f"/tmp/ctl-ray-{os.getpid()}")
    (code,) = blocks("clusters")
    variables = {
        "RAY_TMPDIR": str(temporary),
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    variables["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # as the page advises
    folder = Folder(tmp_path / "checkout")
    folder.pause()
    run = child.start(["-c", code + RAY], cwd=folder.path, **variables)
    try:
        _, worker = folder.wait_until_paused(run)
        os.kill(worker, signal.SIGKILL)
        folder.go_on()
        _, err = run.communicate(timeout=600)
        assert run.returncode == 0, err
    finally:
        run.kill()
        shutil.rmtree(temporary, ignore_errors=True)
    trained, tuned = json.loads((folder.path / "outcome.json").read_text())
    assert trained["step"] == trained["metrics"]["step"] == 30
    assert {"ckpt-30.index", "ckpt-30.whole"} <= set(trained["files"])
    assert trained["metrics"]["eval/accuracy"] > 0 and "train/loss" in trained["metrics"]
    assert ("resume", 10) in folder.check("mnist_multi_worker")
    assert (tuned["errors"], tuned["steps"]) == (0, [30, 30])
    runs = (folder.path / f"runs/mnist.ray/learning_rate={rate}" for rate in (0.001, 0.003))
    assert tuned["best"] == max(experiments.read_result(run)["eval"]["accuracy"] for run in runs)
