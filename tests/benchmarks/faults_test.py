"""The table of survived faults has the counts of both versions."""

import json

from benchmarks import faults


def test_table_has_the_counts_of_both_versions(monkeypatch, tmp_path):
    def run(loop, stride, *, tree):
        failed = 3 * (tree == tmp_path)
        return {"tries": 5, "survived": 5 - failed, "failed": failed}

    monkeypatch.setattr(faults, "run", run)
    path = tmp_path / "faults.json"
    faults.main([f"--before={tmp_path}", f"--result={path}"])
    table = json.loads(path.read_text())["tables"]["tries"]
    titles = [f"{which}{count}" for which in ("before: ", "") for count in ("tries", "failed")]
    columns = [title for title, _ in table["columns"]]
    assert len(table["rows"]) == len(faults.LOOPS)
    for row in table["rows"]:
        assert [row[columns.index(title)] for title in titles] == [5, 3, 5, 0]
