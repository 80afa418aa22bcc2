"""The table of the times to the first step."""

from benchmarks import first_step


def test_ratios_are_medians_over_rounds_of_the_ratio_to_the_hand_written_loop(monkeypatch, capsys):
    seconds = {"ctl": [(9, 2), (6, 3), (4, 9)], "hand-written": [(10, 2), (5, 2), (8, 3)]}
    monkeypatch.setattr(first_step, "measure", lambda name, *_: seconds[name].pop(0))
    flags = "--models mnist --replicas 2 --rounds 3 --programs ctl hand-written"
    first_step.main(flags.split())
    lines = capsys.readouterr().out.splitlines()
    assert "### mnist, 2 replicas, 3 rounds" in lines
    # Ratios of the rounds: 0.9, 1.2, 0.5 and 1, 1.5, 3.
    assert "| ctl | 6.00 s | 0.90 | 3.00 s | 1.50 |" in lines
    assert "| hand-written | 8.00 s | 1.00 | 2.00 s | 1.00 |" in lines


def test_pages_show_how_many_times_as_fast_ctl_is():
    rounds = [{"ctl": (2, 1), "orbit": (5, None)}, {"ctl": (4, 3), "orbit": (6, None)}]
    table = first_step.result_table(rounds)
    assert table.rows == [["ctl", 3, None, 2, None], ["orbit", 5.5, 2.0, None, None]]
