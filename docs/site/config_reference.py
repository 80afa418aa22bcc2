"""Renders the tables of reference/config.md from the declarations of ctl.configs.keys."""

import re

from ctl.configs import keys


def render() -> str:
    """Returns one table per section, as Markdown; the first one has the keys without a section."""
    tables: dict[str, list[str]] = {"": []}
    for key in keys.KEYS:
        section = key.name.partition(".")[0] if "." in key.name else ""
        if not key.is_section:
            tables.setdefault(section, []).append(_row(key))
    lines: list[str] = []
    for section, rows in tables.items():
        lines += ["", f"## `{section}`" if section else "## Keys without a section", ""]
        lines += [_markdown(keys.BY_NAME[section].text) if section else "", ""]
        lines += ["| key | type | default | meaning | resume |", "|---|---|---|---|---|", *rows]
    return "\n".join(lines)


def _row(key: keys.Key) -> str:
    meaning = _markdown(key.text)
    if key.free:
        return f"| `{key.name}` | dict | `{{}}` | {meaning} | |"
    resume = "yes" if keys.is_harmless(key.name) else ""
    default = repr(key.default).replace("'", '"')
    return f"| `{key.name}` | {key.type} | `{default}` | {meaning} | {resume} |"


def _markdown(text: str) -> str:
    text = re.sub(r"([*\[\]|<])", r"\\\1", text)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1.md](../\1.md)", text)
