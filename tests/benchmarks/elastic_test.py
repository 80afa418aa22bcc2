"""A run that loses a worker and gets it back computes what one process computes."""

import pytest

from benchmarks import elastic


@pytest.mark.parametrize(
    ("code", "is_starting", "is_valid"),
    [
        (75, False, True),
        (75, True, True),
        (130, True, True),
        (-2, True, True),
        (143, True, True),
        (130, False, False),
        (143, False, False),
        (0, True, False),
        (1, True, False),
        (2, False, False),
    ],
)
def test_interrupted_run_must_have_saved_unless_it_starts(code, is_starting, is_valid):
    if is_valid:
        elastic.check_interrupted(code, is_starting=is_starting)
    else:
        with pytest.raises(SystemExit, match="ended with exit code"):
            elastic.check_interrupted(code, is_starting=is_starting)


# The run must last until the lost worker has returned, which depends on what else the machine does;
# tests/hardware/processes_test.py has the same cases with processes that start at once.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        ["--phase=step"],
        ["--phase=start"],
        ["--phase=save"],
        ["--phase=grow"],
        ["--phase=grow", "--signal=SIGINT"],
    ],
)
def test_lost_worker_changes_no_weight_and_loses_no_example(options, capsys):
    elastic.main(options)
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert float(row.split("|")[-2]) <= elastic.TOLERANCE
