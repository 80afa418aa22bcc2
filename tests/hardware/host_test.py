"""The CPU and the memory of the machine, in one line each."""

import resource

import pytest

from ctl.hardware import host
from tests.support import child

X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "usable", "total", "line"),
    [
        (X86, 1, 1, "1 logical core, AMD EPYC"),
        (ARM, 2, 64, "2 of 64 logical cores"),
        ("", 8, 8, "8 logical cores"),
    ],
)
def test_cpu_is_described_by_its_cores_and_its_model(cpuinfo, usable, total, line):
    assert host.describe_cpu(cpuinfo, usable=usable, total=total) == line


NUMBERED = (
    "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t: smep fma avx2 amx_tile\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "model", "instructions"),
    [
        (X86, "AMD EPYC", "avx2"),
        (NUMBERED, "AMD EPYC, family 26, model 2", "amx_tile avx2 fma"),
        (ARM, "", "asimd sve"),
    ],
)
def test_cpu_is_identified_by_its_model_and_its_instruction_sets(
    monkeypatch, cpuinfo, model, instructions
):
    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **_: cpuinfo)
    name, flags = host.identify_cpu()
    assert name == model if model else name  # ARM kernels print no model
    assert flags == instructions


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         100 kB\nMemAvailable:    8388608 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limits", "line"),
    [
        (MEMINFO, ["max", ""], "16.0 GiB, 8.0 GiB available"),
        (MEMINFO, [str(2**60)], "16.0 GiB, 8.0 GiB available"),
        (MEMINFO, [str(2**32), str(2**31)], "16.0 GiB, 8.0 GiB available, limited to 2.0 GiB by the "
                                            "container"),
        ("MemTotal:       16777216 kB\n", [], "16.0 GiB"),
        ("", [], "unknown"),
    ],
)  # fmt: skip
def test_memory_is_described_by_its_size_and_what_a_process_may_use_of_it(meminfo, limits, line):
    assert host.describe_memory(meminfo, limits=limits) == line


@pytest.mark.parametrize(
    ("files", "ulimits", "limit"),
    [
        ({"meminfo": MEMINFO, "memory.max": "max"}, {}, 8 * 2**30 * 9 // 10),
        ({"meminfo": MEMINFO, "memory.max": str(10**9)}, {}, 9 * 10**8),
        ({"meminfo": MEMINFO}, {resource.RLIMIT_DATA: 10**9}, 10**9),
        ({"memory.limit_in_bytes": str(10**9)}, {resource.RLIMIT_AS: 10**8}, 10**8),
        ({}, {}, None),
    ],
)
def test_memory_limit_is_the_least_of_all(monkeypatch, files, ulimits, limit):
    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **_: files.get(path.name, ""))
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (ulimits.get(kind, unlimited),) * 2)
    assert host.memory_limit() == limit


def test_peak_memory_includes_what_was_freed():
    code = (
        "import mmap; from ctl.hardware import host; before = host.peak_memory();"
        "mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE).close(); print(host.peak_memory() - before)"
    )
    assert 0.9 * 2**29 < int(child.run(["-c", code]).stdout) < 1.1 * 2**29


def test_this_machine_has_a_cpu_and_memory():
    rows = dict(host.describe())
    assert list(rows) == ["CPU", "memory"]
    assert "logical core" in rows["CPU"]
