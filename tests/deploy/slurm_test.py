"""The batch script for Slurm, with commands in place of srun and scontrol."""

import os
import subprocess

import pytest

from tests.support import child

SCRIPT = child.ROOT / "deploy/slurm/mnist.sbatch"


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (75, True)])
def test_job_continues_after_a_stop_and_ends_with_the_code_of_the_run(tmp_path, code, requeued):
    (tmp_path / "srun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@"\nexit {code}\n')
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mnist"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    run = subprocess.run(["bash", SCRIPT], env=variables, capture_output=True, text=True)
    assert run.returncode == code
    arguments = run.stdout.splitlines()
    assert ("scontrol requeue 7" in arguments) == requeued
    (config,) = (a.removeprefix("--config=") for a in arguments if a.startswith("--config="))
    assert (child.ROOT / config).exists()
    assert "--workdir=runs/mnist" in arguments and "--distribution=block" in arguments
