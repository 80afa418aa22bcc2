"""A Slurm with two nodes of four GPUs each on one machine, for tests; it leaves nothing behind.

    with Slurm(tmp_path) as slurm:
        job = slurm.run("sbatch", "--parsable", "job.sbatch", cwd=folder).stdout.strip()

Each node is a network namespace with a slurmd. The files are in a folder of the test, and the ports are
those of the namespaces, so a Slurm that the machine itself runs is not touched. The GPUs exist for Slurm
only: it assigns them, and there is no device.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import stat
import subprocess

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable
from tests.support import child

NODES = ("gpu-1", "gpu-2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "ip")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=5
MinJobAge=3600
GresTypes=gpu
NodeName=gpu-1 NodeAddr=10.77.0.1 NodeHostname={host} CPUs=32 RealMemory=16000 Gres=gpu:4
NodeName=gpu-2 NodeAddr=10.77.0.2 NodeHostname={host} CPUs=32 RealMemory=16000 Gres=gpu:4
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm(contextlib.ExitStack):
    """Starts the nodes on entry, and skips the test with a reason if that is not possible here.

    Args:
        folder: a folder for the files of Slurm.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self._folder = folder

    def __enter__(self) -> "Slurm":
        super().__enter__()
        missing = [name for name in PROGRAMS if not shutil.which(name)]
        if missing:
            pytest.skip(f"{missing[0]} is not installed: BUILD.md says how to install Slurm")
        try:
            self._hosts = self.enter_context(Hosts(2, hostnames=NODES))
        except Unavailable as error:
            pytest.skip(f"no network namespaces: {error}")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        (self._folder / "state").mkdir(parents=True)
        config = self._folder / "slurm.conf"
        config.write_text(CONFIG.format(folder=self._folder, host=socket.gethostname()))
        # `ip netns exec` hides the mounted cgroups, which this Slurm does not use.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for i in range(4):  # Slurm checks that the devices exist; these are copies of /dev/null
            os.mknod(self._folder / f"gpu{i}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        gpus = f"AutoDetect=off\nName=gpu File={self._folder}/gpu[0-3]\n"
        (self._folder / "gres.conf").write_text(gpus)
        inherited = child.environment(SLURM_CONF=str(config))
        self._environment = {k: v for k, v in inherited.items() if "CUDA" not in k}
        self._daemon(0, "slurmctld", "-D")
        for index, node in enumerate(NODES):
            self._daemon(index, "slurmd", "-D", "-N", node)
        sinfo = ("sinfo", "-h", "-N", "-o", "%T")
        child.wait_for(lambda: self.run(*sinfo).stdout.split() == ["idle", "idle"], seconds=60)

    def _daemon(self, host: int, *command: str) -> None:
        log = self.enter_context((self._folder / f"{command[0]}-{host}.out").open("w"))
        self._hosts.popen(
            host, command, env=self._environment, stdout=log, stderr=log, start_new_session=True
        )

    def popen(self, *command: str, **options) -> subprocess.Popen[str]:
        """Starts a command on the first node."""
        return self._hosts.popen(0, command, env=self._environment, **child.PIPES, **options)

    def run(self, *command: str, **options) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node to its end."""
        process = self.popen(*command, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def wait(self, job: str) -> None:
        """Waits until a job is complete; a failed job ends the wait with what it printed."""

        def is_complete() -> bool:
            lines = self.run("scontrol", "show", "job", "-o", job).stdout
            state = lines.partition("JobState=")[2].partition(" ")[0]
            output = pathlib.Path(lines.partition("StdOut=")[2].partition(" ")[0])
            assert state != "FAILED", lines + output.read_text()
            return state == "COMPLETED"

        child.wait_for(is_complete)

    def processes(self) -> list[str]:
        """Returns the command lines of ctl on both nodes."""
        lines = []
        for name in self._hosts.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(OSError):
                    line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                    lines.append(line.replace("\0", " "))
        return [line for line in lines if "ctl.main" in line]
