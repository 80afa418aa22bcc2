"""The pictures of the documentation show what ctl prints."""

import html
import re

import pytest

from tests.support import child

IMAGES = child.ROOT / "docs/images"


@pytest.mark.slow
@pytest.mark.long
def test_picture_of_a_planted_mistake_is_the_output_of_check():
    run = "import check; print(check.draw(check.run_check()), end='')"
    drawn = child.run(["-c", run], cwd=IMAGES)
    assert drawn.returncode == 0, drawn.stderr
    texts = [mask_losses(svg) for svg in (drawn.stdout, (IMAGES / "check.svg").read_text())]
    assert texts[0] == texts[1]


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
    drawn = child.run(["-c", f"{write}\n{code}"], cwd=IMAGES)
    assert drawn.returncode == 0, drawn.stderr
    again = f"python docs/images/{name}.py"
    assert (tmp_path / f"{name}.svg").read_text() == (IMAGES / f"{name}.svg").read_text(), again


@pytest.mark.slow
@pytest.mark.long
def test_picture_of_three_examples_is_what_the_programs_compute():
    run = "import uneven; print(uneven.measure())"
    measured = child.run(["-c", run], cwd=IMAGES)
    assert measured.returncode == 0, measured.stderr
    numbers = re.findall(r": (\d+\.\d+)", measured.stdout)
    drawn = re.findall(r"bold\">(\d+\.\d+)", (IMAGES / "uneven.svg").read_text())
    assert [f"{float(number):.1f}" for number in numbers[-5:]] == drawn and len(drawn) == 5


@pytest.mark.slow
@pytest.mark.long
def test_curves_of_replicas_are_equal_and_a_killed_run_has_the_same_bits():
    # `draw` compares the bits of the killed run; the picture gives the difference of the replicas.
    run = "import curves; m = curves.measure(); curves.assert_same(m); print(curves.difference(m))"
    done = child.run(["-c", run], cwd=IMAGES)
    assert done.returncode == 0 and float(done.stdout) < 1e-4, done.stdout + done.stderr
