"""What ctl.ray passes to Ray; tests/end_to_end/ray_test.py runs it."""

import subprocess
import sys

import pytest

from ctl.errors import Failure, UsageError
from tests.support import child, experiments

ray = pytest.importorskip("ray", reason="Ray is not installed: BUILD.md says how")
pytestmark = pytest.mark.slow  # the default environment has no Ray
SWEEP = """
def get_sweep():
    return [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.1}]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    from ctl import ray as module

    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT + SWEEP})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return module


def test_trainer_runs_the_command_in_the_folders_of_the_driver(module, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    made = module.trainer("experiment.py:a", num_workers=3, arguments=["--mode=train"])
    assert made.scaling_config.num_workers == 3 and not made.scaling_config.use_gpu
    assert made.train_loop_config == {
        "command": [f"--config={tmp_path / 'experiment.py'}:a", "--mode=train"],
        "workdir": str(tmp_path / "runs/experiment.a"),
        "cwd": str(tmp_path),
        "environment": {"TF_USE_LEGACY_KERAS": "1"},
    }
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4})
    made = module.trainer("experiment.py", workdir="w", scaling_config=scaling)
    assert made.scaling_config is scaling
    assert made.train_loop_config["workdir"] == str(tmp_path / "w")


def test_tuner_tries_all_values_of_a_list_or_the_runs_of_the_config_file(module):
    rates = ray.tune.loguniform(1e-4, 1e-2)
    made = module.tuner("experiment.py", {"seed": [1, 2], "optimizer.learning_rate": rates})
    space = made._local_tuner._param_space
    assert space == {"seed": {"grid_search": [1, 2]}, "optimizer.learning_rate": rates}
    (runs,) = module.tuner("experiment.py")._local_tuner._param_space.values()
    assert runs == {"grid_search": [{"seed": "1"}, {"seed": "2", "optimizer.learning_rate": "0.1"}]}
    experiments.write(".", {"none.py": experiments.DROPOUT})
    with pytest.raises(UsageError, match=r"none\.py has no get_sweep"):
        module.tuner("none.py")


def test_worker_raises_the_errors_of_the_program(module, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.main, "execute", lambda argv, actions: 75)
        task = module.trainer("experiment.py").train_loop_config
        with pytest.raises(Failure, match="ended with exit code 75"):
            module._execute(task, task["workdir"], None, None)
    task = module.trainer("experiment.py", arguments=["--config.trian.steps=1"]).train_loop_config
    with pytest.raises(UsageError, match="did you mean"):
        module._execute(task, task["workdir"], None, None)


def test_missing_ray_is_named():
    text = "import sys; sys.modules['ray'] = None; import ctl; ctl.ray"
    run = subprocess.run(
        [sys.executable, "-c", text], env=child.environment(), capture_output=True, text=True
    )
    assert "ctl.ray requires Ray" in run.stderr.splitlines()[-1]
