"""The navigation and the generated tables of the documentation site are complete."""

import importlib.util
import re

import yaml

from ctl import commands
from ctl.configs import flags, keys, overrides
from ctl.configs.modes import MODES
from tests import child

SITE = child.ROOT / "docs/site"
CONFIG = (child.ROOT / "mkdocs.yml").read_text()


def load(name):
    """Imports a module of docs/site, as mkdocs does, without its other modules."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_rows():
    """Key -> its cells: type, default, meaning, resume."""
    table = load("config_reference").render()
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
    assert len(copies) >= 4
    files = {str(p.relative_to(child.ROOT / "docs")) for p in child.ROOT.glob("docs/**/*.md")}
    listed = pages(yaml.safe_load(CONFIG)["nav"])
    assert listed <= files | copies  # the hook lists other files under More
    assert copies <= listed


def test_every_key_has_a_row_with_its_type_default_and_meaning():
    rows = config_rows()
    assert set(rows) == {*overrides.flatten(keys.defaults()), *keys.FREE_SECTIONS}
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
    module = load("command_reference")
    for names, table in (
        (MODES, module.render_modes()),
        (flags.describe_flags(), module.render_flags()),
        ([f"ctl {name}" for name in commands.COMMANDS], module.render_commands()),
    ):
        assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == set(names)


def test_pages_load_nothing_from_other_hosts():
    config = yaml.safe_load(CONFIG)
    assert config["theme"]["font"] is False
    assert "://" not in re.sub(r"#.*", "", CONFIG)
