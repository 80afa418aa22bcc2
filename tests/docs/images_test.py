"""The pictures of the documentation show what ctl prints."""

import pytest

from tests import child

IMAGES = child.ROOT / "docs/images"


@pytest.mark.slow
def test_picture_of_a_planted_mistake_is_the_output_of_check():
    run = "import check; print(check.draw(check.run_check()), end='')"
    drawn = child.run(["-c", run], cwd=IMAGES)
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout == (IMAGES / "check.svg").read_text()


def test_pictures_load_nothing():
    for path in IMAGES.glob("*.svg"):
        addresses = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in addresses and "@import" not in addresses, path
