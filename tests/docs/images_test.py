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


def test_pictures_load_nothing():
    for path in IMAGES.glob("*.svg"):
        addresses = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in addresses and "@import" not in addresses, path
