"""GPUs are divided among the processes that compute."""

import pytest

from ctl.hardware import cluster, gpu


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("0,1", ["0", "1"]),
        (" 2 , GPU-ab ", ["2", "GPU-ab"]),
        ("-1", []),
        ("", []),
        ("1,-1,2", ["1"]),
    ],
)
def test_the_environment_says_which_gpus_there_are(value, found):
    assert gpu.list_gpus({"CUDA_VISIBLE_DEVICES": value}) == found


def test_no_driver_is_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpu.list_gpus({}) == []


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        (["0", "1"], ["0", "1"]),
        (["0", "1", "2", "3"], ["0,1", "2,3"]),
        (["0", "1", "2"], ["0,1", "2"]),
    ],
)
def test_workers_share_the_gpus(gpus, found):
    places = cluster.local(workers=2, servers=0, ports=[1, 2])
    got = gpu.divide_among_processes(places, gpus)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in got] == found


def test_only_workers_compute():
    places = cluster.local(workers=1, servers=1, ports=[1, 2, 3])
    got = gpu.divide_among_processes(places, ["0", "1"])
    assert [own["CUDA_VISIBLE_DEVICES"] for own in got] == ["-1", "0,1", "-1"]
    assert gpu.divide_among_processes(places, []) == [{}, {}, {}]
