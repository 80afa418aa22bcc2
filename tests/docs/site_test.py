"""The navigation of the documentation site, and the generated reference, are complete."""

import re
import sys

import pytest
import yaml

import ctl
from ctl import commands
from ctl.configs import flags, keys, loading, overrides
from ctl.configs.modes import MODES
from tests.support import child

SITE = child.ROOT / "docs/site"
CONFIG = (child.ROOT / "mkdocs.yml").read_text()


def config_rows():
    """Key -> its cells: type, default, meaning, resume."""
    table = (child.ROOT / "docs/reference/config.md").read_text().partition("<!-- generated")[2]
    rows = [re.split(r" *(?<!\\)\| *", row) for row in re.findall(r"^\| `.*", table, re.MULTILINE)]
    assert {len(row) for row in rows} == {7}
    return {row[1].strip("`"): row[2:-1] for row in rows}


def pages(entry):
    """The files in a part of the navigation."""
    if isinstance(entry, str):
        return {entry}
    parts = entry.values() if isinstance(entry, dict) else entry
    return set().union(*map(pages, parts))


def test_pages_in_the_navigation_exist():
    copies = set(re.findall(r'^    "(.*\.md)": "', (SITE / "hooks.py").read_text(), re.MULTILINE))
    assert len(copies) == 3
    paths = [*child.ROOT.glob("docs/**/*.md"), *child.ROOT.glob("docs/notebooks/*.ipynb")]
    files = {str(p.relative_to(child.ROOT / "docs").with_suffix(".md")) for p in paths}
    listed = pages(yaml.safe_load(CONFIG)["nav"])
    assert listed <= files | copies  # the hook lists other files under More
    assert copies <= listed


def test_every_key_has_a_row_with_its_type_default_and_meaning():
    rows = config_rows()
    optional = {key.name for key in keys.KEYS if key.optional}
    assert set(rows) == {*overrides.flatten(keys.defaults()), *keys.FREE_SECTIONS, *optional}
    assert [name for name, cells in rows.items() if not all(cells[:3])] == []
    assert rows["runtime.logical_shards"][:2] == ["integer", "`0`"]
    assert rows["train.steps"][:2] == ["duration", "`1000`"]
    assert rows["optimizer.arguments"][:2] == ["dict", "`{}`"]
    assert rows["eval.before_training"][2] == "Also evaluate at step 0."
    assert rows["data.cache"][2].startswith("Keep parsed examples, before the augmentation: ")


def test_rows_state_which_keys_may_change_when_a_run_resumes():
    may_change = {name for name, cells in config_rows().items() if cells[3]}
    assert {"eval.interval", "runtime.xla"} <= may_change
    assert not {"optimizer.learning_rate", "runtime.precision"} & may_change


def test_every_mode_flag_and_command_has_a_row():
    page = (child.ROOT / "docs/reference/command-line.md").read_text()
    names = {*MODES, *flags.describe_flags(), *(f"ctl {name}" for name in commands.COMMANDS)}
    tables = page.partition("## The workdir")[0]
    assert set(re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE)) == names


def test_the_reference_is_current_and_has_every_public_name(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    generate = loading.import_file(child.ROOT / "docs/reference/generate.py")
    pages = {path: path.read_text() for path in generate.PAGES}
    outdated = [path.name for path, text in pages.items() if generate.render_page(text) != text]
    text = generate.OPTIONS.read_text()
    outdated += [generate.OPTIONS.name] * (generate.render_options(text) != text)
    assert outdated == [], "run .uv/bin/uv run python docs/reference/generate.py"
    named = re.findall("^## class `ctl.(.*)`$", "".join(pages.values()), re.MULTILINE)
    assert {n for n in ctl.__all__ if isinstance(getattr(ctl, n), type)} <= {*named}


@pytest.mark.parametrize(
    "page", ["trainer", "own-loop", "run", "data", "random-replica-ray", "testing"]
)
def test_the_anchors_of_the_tables_of_names_are_headings(page):
    text = (child.ROOT / f"docs/reference/api/{page}.md").read_text()
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    # GitHub and mkdocs drop the punctuation of a heading.
    anchors = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}
    links = re.findall(r"^\| \[`.*?\]\(#(.*?)\)", text, re.MULTILINE)
    assert len(links) >= 3 and {*links} <= anchors


def test_pages_load_nothing_from_other_hosts():
    config = yaml.safe_load(CONFIG)
    assert config["theme"]["font"] is False
    assert "://" not in re.sub(r"#.*", "", CONFIG)


def test_names_of_ctl_random_are_those_of_the_reference():
    text = (child.ROOT / "docs/reference/api/random-replica-ray.md").read_text()
    named = re.findall(r"^## `ctl\.random\.(\w+)`$", text, re.MULTILINE)
    assert ctl.random.__all__ == sorted(named)
