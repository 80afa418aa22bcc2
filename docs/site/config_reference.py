"""Renders the tables of reference/config.md from ctl.configs.reference, which reads defaults.py."""

from collections.abc import Iterator
import re

from ctl.configs import defaults, reference


def render() -> str:
    """Returns one table per section, as Markdown; the first one has the keys without a section."""
    texts = dict(reference.key_texts())
    tables: dict[str, list[str]] = {"": []}
    for name, row in _rows(texts):
        section = name.partition(".")[0] if "." in name else ""
        tables.setdefault(section, []).append(row)
    lines: list[str] = []
    for section, rows in tables.items():
        lines += ["", f"## `{section}`" if section else "## Keys without a section", ""]
        lines += [_sentence(texts.get(section, "")), ""]
        lines += ["| key | type | default | meaning | resume |", "|---|---|---|---|---|", *rows]
    return "\n".join(lines)


def _rows(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the name of each key and its row, in the order of defaults.py."""
    keys = {key.name: key for key in reference.config_keys()}
    for name in texts:
        meaning = _sentence(texts[name])
        if name in defaults.FREE_SECTIONS:
            yield name, f"| `{name}` | dict | `{{}}` | {meaning} | |"
        elif name in keys:
            resume = "yes" if _may_change(name) else ""
            default = keys[name].default.replace("'", '"')
            yield name, f"| `{name}` | {keys[name].type} | `{default}` | {meaning} | {resume} |"


def _may_change(name: str) -> bool:
    return any(
        name.startswith(harmless) if harmless.endswith(".") else name == harmless
        for harmless in defaults.HARMLESS
    )


def _sentence(comment: str) -> str:
    """Returns a comment as Markdown; its first word stays as it is if it is a value of the key."""
    if not comment:
        return ""
    word = comment.split()[0]
    if word.isalpha() and word not in ("max", "sgd"):
        comment = comment[0].upper() + comment[1:]
    text = re.sub(r"([*\[\]|<])", r"\\\1", comment if comment[-1] in ".!?" else f"{comment}.")
    return re.sub(r"docs/([\w-]+)\.md", r"[\1.md](../\1.md)", text)
