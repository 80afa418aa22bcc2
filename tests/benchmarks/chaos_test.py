"""A run that is killed repeatedly ends with the same bits as an undisturbed one."""

import contextlib

import pytest

from benchmarks import chaos, counting


@pytest.mark.parametrize(
    ("code", "output", "phase", "message"),
    [
        (0, "Done", "step", "exit code 0"),
        (-15, "training", "step", "exit code -15"),
        (75, "Lost a worker", "step", "stopped in step without a checkpoint"),
        (75, "Stopped at step 60", "step", "stopped at 60, saved 0"),
        (-15, "", "start", ""),  # it may come before there is anything to save
        (75, "Interrupted", "start", ""),
    ],
)
def test_sigterm_without_a_checkpoint_and_exit_code_75_is_reported(
    tmp_path, code, output, phase, message
):
    (tmp_path / "result.json").write_text('{"step": 60}')
    expected = pytest.raises(SystemExit, match=message) if message else contextlib.nullcontext()
    with expected:
        chaos.check_stop(code, output, tmp_path, phase)


@pytest.mark.slow
@pytest.mark.long  # the times of the kills depend on the speed of the machine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "options"),
    [(2500, ["--kills=2", "--signal=SIGTERM"]), (1000, ["--kills=1", "--workers=2"])],
)
def test_kills_change_no_bit_and_lose_no_example(steps, options, capsys):
    chaos.main([*options, f"--steps={steps}"])
    output = capsys.readouterr().out
    epochs, rest = divmod(steps * counting.BATCH, counting.EXAMPLES)
    assert "| largest difference of all weights, slots and counters | 0 |" in output
    assert "| lines of metrics.jsonl, the same in both runs |" in output
    assert f"| epochs x examples, each consumed once | {epochs} x 1003 and {rest} |" in output


def test_line_that_is_missing_or_twice_is_reported():
    line = {"split": "train", "step": 5, "loss": 0.5}
    assert chaos.check_metrics([line], [line]) == 1
    for lines in ([], [line, line], [line | {"loss": 0.25}]):
        with pytest.raises(SystemExit, match=r"metrics\.jsonl has"):
            chaos.check_metrics([line], lines)
