"""ctl report: one page about one run or several."""

import json
import re

import pytest

from ctl import main
from ctl.commands import report, run_files
from ctl.configs import overrides
from ctl.errors import UsageError

pytest.importorskip("plotly")


def write_run(folder, *, rate=1e-3, killed=False):
    folder.mkdir()
    config = overrides.config(
        trainer="a.py:B", data=dict(global_batch_size=4), optimizer=dict(learning_rate=rate)
    )
    (folder / "config.json").write_text(config.to_json())
    records = [
        {"time": 5.0 + step, "split": split, "step": step, "loss": 1 / step, "epoch": 0.1 * step,
         "learning_rate": rate, "examples_per_second": 100.0}
        for step in (5, 10) for split in ("train", "eval")
    ]  # fmt: skip
    records.append({"time": 20.0, "split": "train", "step": 15, "loss": "NaN"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"cut')
    events = [
        {"time": 1.0, "event": "start", "step": 0},
        {"time": 4.0, "event": "checkpoint", "step": 10, "path": "<ckpt>",
         "seconds": {"total": 8.0, "steps": 6.0, "saving": 2.0}},
        {"time": 4.5, "event": "profile", "step": 9, "first": 5, "operations": [["conv", 0.5]]},
    ]  # fmt: skip
    if not killed:
        events.append({"time": 9.0, "event": "end", "step": 15})
        result = {"step": 15, "train": {"loss": 0.1}, "eval": {"loss": 0.25}, "flops_per_step": 1e9,
                  "model_flops_utilization": 0.375,
                  "best": {"metric": "eval/loss", "value": 0.2, "step": 5},
                  "goodput": {"steps": 0.75, "saving": 0.25, "seconds": 8.0}}  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return str(folder)


def texts(page):
    """The page without its scripts and tags."""
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", page)


def test_names_in_a_run_of_someone_else_are_text(tmp_path):
    evil = "</script><script>alert(1)</script>"
    write_run(tmp_path / "a")
    for name in ("config.json", "metrics.jsonl", "events.jsonl", "result.json"):
        path = tmp_path / "a" / name
        text = path.read_text()
        for word in ("a.py:B", "loss", "conv", "<ckpt>"):
            text = text.replace(word, evil)
        path.write_text(text)
    page = report.render(run_files.read_runs([str(tmp_path / "a")]))
    assert page.count("alert(1)") > 3 and "<script>alert(1)" not in page


def test_page_of_one_run(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    assert main.run(["ctl", "report", run]) == 0
    assert capsys.readouterr().out.startswith(f"{run}/report.html: ")
    page = (tmp_path / "a/report.html").read_text()
    text = texts(page)
    for part in ("complete", "75.0% in steps", "37.5%", "eval/loss 0.2 at step 5", "conv", "a.py:B",
                 "data.global_batch_size", "&lt;ckpt&gt;"):  # fmt: skip
        assert part in (page if part.startswith("&") else text), part
    titles = re.findall(r'"title":\{"text":"(\w+)"\}', page)
    assert {"loss", "learning_rate", "examples_per_second"} <= set(titles)
    # Plotly would draw a constant of 0.001 as a line at 0.
    assert '"range":[0,0.002]' in page and '"range":[0,200.0]' in page
    # Nothing is loaded from a server.
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="?http', page)


def test_comparison_of_runs_shows_their_differences(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=0.25, killed=True)]
    page = tmp_path / "both.html"
    assert report.main([*runs, f"--output={page}"]) == 0
    text = texts(page.read_text())
    assert "running or killed" in text and "0.25" in text
    section = text.partition("Click on a heading to sort.")[2].partition("Metrics")[0]
    lines = [line.split() for line in section.strip().splitlines()]
    assert lines[0][:5] == ["run", "optimizer.learning_rate", "eval/loss", "train/loss", "best"]
    assert lines[1][:5] == ["b", "(best)", "0.25", "0.1", "nan"]
    assert lines[2][:4] == ["a", "0.001", "0.1", "nan"]  # its best checkpoint has 0.2
    # One legend for the page, and none in the charts.
    assert page.read_text().count('<div class="legend">') == 1
    assert '"name":"b eval"' in page.read_text() and '"showlegend":true' not in page.read_text()


def test_best_run_of_a_sweep_is_the_first_row_and_marked(tmp_path):
    for name, loss in (("a", 0.5), ("b", 0.25), ("c", "NaN")):
        write_run(tmp_path / name, killed=True)
        record = {"time": 30.0, "split": "eval", "step": 20, "loss": loss}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert report.main([str(tmp_path), f"--output={tmp_path / 'page.html'}"]) == 0
    text = texts((tmp_path / "page.html").read_text())
    assert "Best first, by eval/loss, smallest first." in text
    rows = text.partition("to sort.")[2].partition("Metrics")[0].strip().splitlines()
    assert [row.split()[0] for row in rows if row.strip()][:4] == ["run", "b", "a", "c"]
    assert "b (best)" in text and text.count("(best)") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing has no config.json, so it is not a run"),
        (["a", "--output=no/page.html"], "no/page.html cannot be written"),
        (["a", "--output=."], ". is a folder: name a file by --output"),
        (["a", "--outptu=x"], "ctl report: unrecognized arguments: --outptu=x: write ctl report"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    with pytest.raises(UsageError, match=re.escape(message)):
        report.main(arguments)
