"""The tables of the pages, and the figures of README.md, are those of the measured files."""

import json
import re

import pytest

from benchmarks import results
from tests.support import child

README = (child.ROOT / "README.md").read_text()


def test_every_table_is_that_of_its_file():
    pages = dict(results.pages())
    assert child.ROOT / "docs/speed.md" in pages
    for path, text in pages.items():
        assert path.read_text() == text, "python -m benchmarks.results writes the page"


def test_every_file_is_on_a_page():
    text = "".join(path.read_text() for path, _ in results.pages())
    for path in results.FOLDER.glob("*.json"):
        for table in json.loads(path.read_text())["tables"]:
            assert f"<!-- results: {path.stem}.{table} -->" in text


RATIO = "ctl is N times as fast"
FIGURES = {
    "hand-written `tf.range` loop, MNIST": [
        ("loops", "ratio", "a hand-written `tf.range` loop", "mnist64, batch 64")
    ],
    "compiled PyTorch": [
        ("gpu", "speed", "ResNet-50, float16, batch 128, `data.placement=device`", RATIO),
        ("gpu", "speed", "Transformer like GPT-2 small, bfloat16, batch 64", RATIO),
    ],
    "JAX `lax.scan`": [
        ("gpu", "speed", "MNIST, float32, batch 256, `data.placement=device`", RATIO)
    ],
}


@pytest.mark.parametrize("words", FIGURES)
def test_figures_of_the_first_page_are_measured(words):
    (line,) = (each for each in README.splitlines() if words in each)
    assert {*re.findall(r"\d\.\d\d", line)} == {results.figure(*f) for f in FIGURES[words]}


def test_measurement_is_written_with_its_conditions_and_shown(tmp_path, monkeypatch):
    table = results.Table(
        [("loop", None), ("examples/s", 0), ("ctl is N times as fast", 2)],
        [["ctl", 1234.5, None], ["other", 1000, [1.2345, 1.1, 1.301]]],
    )
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["x", "--quick", "--result", "one.json", "--models", "a b"])
    options = dict(samples="medians", packages=["numpy"], versions={"x": "1"})
    results.save(tmp_path / "one.json", {"speed": table}, **options)
    one = results.load("one")
    assert one["host"]["cores"] > 0 and re.fullmatch("[0-9a-f]{7,}", one["commit"])
    assert one["command"].endswith("--quick --models 'a b'") and "numpy 2" in results.describe(one)
    assert results.format_table(one["tables"]["speed"]).splitlines() == [
        "| loop | examples/s | ctl is N times as fast |",
        "| --- | ---: | ---: |",
        "| ctl | 1,234 |  |",
        "| other | 1,000 | 1.23 (1.10 to 1.30) |",
    ]
    assert results.figure("one", "speed", "other", "ctl is N times as fast") == "1.23"
