"""The machine's CPU and memory in a line each."""

import pytest

from ctl.hardware import host

X86 = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_tile amx_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "usable", "there", "line"),
    [
        (X86, 8, 8, "8 logical cores, AMD EPYC, AVX2, FMA, AVX-512, AVX-512 BF16, AMX, AMX BF16"),
        (ARM, 2, 64, "2 of 64 logical cores, NEON, SVE, BF16"),
        ("model name\t: Old\nflags\t\t: sse2\n", 1, 1, "1 logical core, Old"),
        ("", 8, 8, "8 logical cores"),
    ],
)
def test_cpu_is_its_cores_its_model_and_the_instructions_that_matter(cpuinfo, usable, there, line):
    assert host.cpu(cpuinfo, usable=usable, there=there) == line


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         100 kB\nMemAvailable:    8388608 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limits", "line"),
    [
        (MEMINFO, [], "16.0 GiB, 8.0 GiB available"),
        (MEMINFO, ["max", ""], "16.0 GiB, 8.0 GiB available"),
        (MEMINFO, [str(2**60)], "16.0 GiB, 8.0 GiB available"),
        (
            MEMINFO, [str(4 * 2**30), str(2 * 2**30)],
            "16.0 GiB, 8.0 GiB available, bounded to 2.0 GiB by the container",
        ),
        ("MemTotal:       16777216 kB\n", [], "16.0 GiB"),
        ("", [], "unknown"),
    ],
)  # fmt: skip
def test_memory_is_what_is_there_and_what_of_it_may_be_used(meminfo, limits, line):
    assert host.memory(meminfo, limits=limits) == line


def test_this_machine_has_a_cpu_and_memory():
    rows = dict(host.describe())
    assert list(rows) == ["CPU", "memory"]
    assert "logical core" in rows["CPU"]
