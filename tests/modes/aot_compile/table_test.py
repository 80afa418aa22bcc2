"""The table of the results, and the JSON file."""

import json

from ctl.modes.aot_compile import slices, table
from ctl.modes.aot_compile.compiler_process import Compiled
from ctl.modes.aot_compile.problems import Problem
from ctl.modes.aot_compile.survey import SliceResult

GIB = 2**30
TRAIN = Compiled(
    peak_bytes=3 * GIB,
    argument_bytes=GIB,
    flops=4e9,
    bytes=2e9,
    all_reduces=7,
    all_reduce_bytes=2**20,
    seconds=5.0,
)
FITS = SliceResult(slices.find_slice("v5e:2x2"), 256, {"train step": TRAIN, "eval step": TRAIN}, [])
TOO_LARGE = SliceResult(
    slices.find_slice("v4:2x2x1"),
    512,
    {"train step": Compiled(error="no", out_of_memory=True, peak_bytes=20 * GIB)},
    [Problem("it does not fit"), Problem("slow", "experiment.py:3", fatal=False)],
    largest_batch=128,
)


def test_the_table_has_one_row_per_program():
    header, first, second, third, *rest = table.format_table([FITS, TOO_LARGE]).splitlines()
    assert first.split()[:2] == ["v5e:2x2", "4"]
    for part in ("train step compiles", "3.00 GiB", "19.0%", "1.00 GiB", "2.00 GiB", "7, 1.0 MiB"):
        assert part in first
    assert header.index("peak") == first.index("3.00 GiB")
    assert "eval step compiles" in second
    assert "train step: out of HBM" in third
    assert any("largest global batch that fits is 128" in line for line in rest)
    assert rest[-2:] == ["error: it does not fit", "warning: experiment.py:3: slow"]


def test_a_problem_of_several_slices_is_listed_once():
    text = table.format_table([TOO_LARGE, TOO_LARGE])
    assert text.count("error: it does not fit") == 1


def test_the_file_holds_the_figures_of_every_slice(tmp_path):
    path = table.write_json([FITS, TOO_LARGE], tmp_path / "new")
    first, second = json.loads(path.read_text())["topologies"]
    expected = {
        "topology": "v5e:2x2",
        "cores": 4,
        "compiled": True,
        "peak_bytes": 3 * GIB,
        "flops": 4e9,
        "bytes": 2e9,
        "all_reduces": 7,
        "all_reduce_bytes": 2**20,
        "error": None,
    }
    assert {key: first[key] for key in expected} == expected
    assert first["hbm_bytes"] == slices.find_slice("v5e:2x2").hbm_bytes
    assert second["compiled"] is False
    assert second["error"] == "it does not fit"
    assert second["warnings"] == ["experiment.py:3: slow"]
    assert second["largest_global_batch_size"] == 128
    assert [p.name for p in path.parent.iterdir()] == ["aot_compile.json"]
