"""A run that loses a worker and gets it back computes what one process computes."""

import pytest

from benchmarks import elastic


@pytest.mark.parametrize("is_starting", [False, True])
@pytest.mark.parametrize("code", [75, 130, -2, 143, 0, 1, 2])
def test_interrupted_run_must_have_saved_unless_it_starts(code, is_starting):
    if code == 75 or (is_starting and code in (130, -2, 143)):
        elastic.check_interrupted(code, is_starting=is_starting)
    else:
        with pytest.raises(SystemExit, match="ended with exit code"):
            elastic.check_interrupted(code, is_starting=is_starting)


# The run must last until the lost worker has returned, which depends on what else the machine does;
# tests/hardware/processes_test.py has the same cases with processes that start at once.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [["--phase=step"], ["--phase=grow", "--signal=SIGINT"]])
def test_lost_worker_changes_no_weight_and_loses_no_example(options, capsys):
    elastic.main(options)
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert float(row.split("|")[-2]) <= elastic.TOLERANCE
