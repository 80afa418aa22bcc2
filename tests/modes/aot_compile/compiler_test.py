"""The parts of compiler.py that run without jax; problems_test and survey_test run all of it."""

import signal
import subprocess
import sys

from ctl.modes.aot_compile import compiler


def test_the_bytes_of_all_reduces_are_counted_also_of_combined_ones():
    text = """
      %all-reduce.9 = (f32[]{:T(128)}, bf16[3,3,1,32]{3,2,1,0}) all-reduce(%a, %b), channel_id=1
      %all-reduce-start.1 = f32[10]{0} all-reduce-start(%c), channel_id=2
      %all-reduce-done.1 = f32[10]{0} all-reduce-done(%all-reduce-start.1)
      %add = f32[1000]{0} add(%all-reduce.9, %d)
    """
    assert compiler.measure_all_reduces(text) == [4 + 2 * 288, 40]


def test_a_compiler_whose_parent_was_killed_ends_by_itself(tmp_path):
    with open(compiler.__file__) as file:
        text = file.read().replace("import jax ", "time.sleep(60)")
    assert "time.sleep(60)" in text
    (tmp_path / "compiler.py").write_text(text)
    (tmp_path / "request.json").write_text('{"seconds": 1}')
    command = [sys.executable, tmp_path / "compiler.py", tmp_path / "request.json"]
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGALRM
