"""Renders the tables of reference/command-line.md from ctl's own tables."""

from collections.abc import Mapping

from ctl import commands
from ctl.configs import flags
from ctl.configs.modes import MODES


def render_modes() -> str:
    """Returns a table of the modes, with the flags that each accepts."""
    lines = ["| mode | what it does | flags, besides `--config` |", "|---|---|---|"]
    for name, mode in MODES.items():
        accepted = ", ".join(f"`--{flag}`" for flag in mode.flags)
        lines.append(f"| `{name}` | {_escape(mode.text)} | {accepted} |")
    return "\n".join(lines)


def render_flags() -> str:
    """Returns a table of the flags."""
    return _table("flag", flags.describe_flags())


def render_commands() -> str:
    """Returns a table of the commands that are not modes."""
    return _table("command", {f"ctl {name}": text for name, text in commands.COMMANDS.items()})


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {title} | what it does |", "|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {_escape(text)} |" for name, text in rows.items()])


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
