"""The table of the times to the first step."""

from benchmarks import first_step


def test_ratios_are_medians_over_rounds_of_the_ratio_to_the_hand_written_loop(monkeypatch, capsys):
    seconds = {"ctl": [(9, 2), (6, 3), (4, 9)], "hand-written": [(10, 2), (5, None), (8, 3)]}
    monkeypatch.setattr(first_step, "measure", lambda name, *_: seconds[name].pop(0))
    flags = "--models mnist --replicas 2 --rounds 3 --programs ctl hand-written"
    first_step.main(flags.split())
    lines = capsys.readouterr().out.splitlines()
    # Ratios of the rounds: 0.9, 1.2, 0.5.
    assert "| ctl | 6.00 | 0.90 | 3.00 |" in lines
    assert "| hand-written | 8.00 | 1.00 |  |" in lines
