"""The notebooks of docs/notebooks/ print what they show."""

import pytest

from docs import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_its_outputs(path):
    cells = notebooks.read(path)["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs and {each["output_type"] for each in outputs}.isdisjoint({"error"})
    page = notebooks.to_markdown(path)
    assert page.startswith("# ") and all(
        line in page for cell in cells for line in notebooks.texts(cell)
    )
    figures = sum("application/vnd.plotly.v1+json" in each.get("data", {}) for each in outputs)
    assert page.count("data:image/svg+xml") == figures


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path):
    pytest.importorskip("nbclient")
    if "keras_hub" in path.read_text():
        pytest.importorskip("keras_hub")
    assert notebooks.compare(path, notebooks.execute(path)) == []
