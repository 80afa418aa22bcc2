"""The pictures of the documentation show what ctl prints."""

import html
import re

import pytest

from tests.support import child

IMAGES = child.ROOT / "docs/images"


def run(code):
    """Runs code next to the scripts that draw the pictures; returns what it prints."""
    done = child.run(["-c", code], cwd=IMAGES)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_picture_of_a_planted_mistake_is_the_output_of_check():
    drawn = run("import check; print(check.draw(check.run_check()), end='')")
    assert mask_losses(drawn) == mask_losses((IMAGES / "check.svg").read_text())


def mask_losses(svg):
    """Returns a picture without its losses and their widths: in float32 they differ between CPUs."""
    text = html.unescape(re.sub(r' textLength="[^"]*"', "", svg)).replace("\xa0", " ")
    masked, count = re.subn(r"\d+\.\d+(?=, in replica_step| ->| in \d+ steps)", "LOSS", text)
    assert count == 3
    return masked


def test_pictures_of_experiments_are_shown_and_small():
    page = (child.ROOT / "experiments/README.md").read_text()
    experiments = set(re.findall(r"^\| `(\w+)\.py` ", page, re.MULTILINE))
    shown = re.findall(r"\(\.\./docs/images/gallery-(\w+)\.svg\)", page)
    paths = {path.stem.removeprefix("gallery-"): path for path in IMAGES.glob("gallery-*.svg")}
    assert len(shown) >= 4 and {*shown} == {*paths} and {*shown} <= experiments
    assert [name for name, path in paths.items() if path.stat().st_size >= 40 * 1024] == []


def test_pictures_load_nothing():
    for path in IMAGES.glob("*.svg"):
        addresses = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in addresses and "@import" not in addresses, path


@pytest.mark.parametrize("name", ["update", "map"])
def test_drawing_is_current(name, tmp_path):
    write = f"import svg; p = svg.pathlib.Path({str(tmp_path)!r}) / '{name}.svg'"
    code = {
        "update": "import update; svg.write(p, update.TITLE, *update.SIZE, update.draw())",
        "map": "import map; w, h, e = map.draw(); svg.write(p, map.TITLE, w, h, e, size=13)",
    }[name]
    run(f"{write}\n{code}")
    again = f"python docs/images/{name}.py"
    assert (tmp_path / f"{name}.svg").read_text() == (IMAGES / f"{name}.svg").read_text(), again


@pytest.mark.slow
@pytest.mark.long
def test_picture_of_three_examples_is_what_the_programs_compute():
    numbers = re.findall(r": (\d+\.\d+)", run("import uneven; print(uneven.measure())"))
    drawn = re.findall(r"bold\">(\d+\.\d+)", (IMAGES / "uneven.svg").read_text())
    assert [f"{float(number):.1f}" for number in numbers[-5:]] == drawn and len(drawn) == 5


@pytest.mark.slow
@pytest.mark.long
def test_curves_of_replicas_are_equal_and_a_killed_run_has_the_same_bits():
    # `draw` compares the bits of the killed run; the picture gives the difference of the replicas.
    code = "import curves; m = curves.measure(); curves.assert_same(m); print(curves.difference(m))"
    assert float(run(code)) < 1e-4
