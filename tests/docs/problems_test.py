"""The code blocks of docs/problems run."""

import pytest

from tests.docs.pages import run
from tests.support import child

PAGES = sorted(path.stem for path in child.ROOT.glob("docs/problems/*.md") if path.stem != "index")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")  # restored after the page that sets it
    run(f"problems/{page}")
