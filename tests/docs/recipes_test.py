"""The recipes run as they are written, on data that each test makes."""

import math

import pytest

import ctl
from tests import child
from tests.docs.pages import blocks

PAGES = {path.stem for path in child.ROOT.glob("docs/recipes/*.md")} - {"index"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which a recipe finds its files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(page, steps=2, **changes):
    """Trains the experiment of a page, whose file is my_model.py; returns the run and its results."""
    with open("my_model.py", "w") as file:
        file.write("\n\n".join(blocks(f"recipes/{page}")))
    with ctl.Run("my_model.py", print_lines=False) as run:
        return run, run.train(steps=steps), run.evaluate()


def test_every_recipe_is_in_the_index_and_has_a_test():
    index = (child.ROOT / "docs/recipes/index.md").read_text()
    tests = (child.ROOT / "tests/docs/recipes_test.py").read_text()
    assert {page for page in PAGES if f"({page}.md)" not in index} == set()
    assert {page for page in PAGES if f'"{page}"' not in tests} == set()


def test_several_losses(folder):
    _, trained, evaluated = train("several-losses")
    for results in (trained, evaluated):
        assert {"kind_accuracy", "price_error"} <= results.keys()
        total = results["kind_loss"] + 0.1 * results["price_loss"]
        assert math.isclose(results["loss"], total, rel_tol=1e-5)
