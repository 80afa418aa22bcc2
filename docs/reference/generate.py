"""Writes the generated parts of docs/reference.

They are the config keys, the command line, the Python API and the rules about combinations of options.
The fields of `ctl.TrainerOptions`, with its docstring, are written from the config keys, too.

    .uv/bin/uv run python docs/reference/generate.py

It replaces the text of a page between `<!-- generated: NAME -->` and `<!-- end -->`. griffe reads the
public names and their docstrings without importing ctl.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import importlib
import pathlib
import re
import sys
import textwrap

import griffe

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout of this file, if ctl is installed, too

from ctl import commands  # noqa: E402
from ctl.configs import flags, keys  # noqa: E402
from ctl.configs.component import Key  # noqa: E402
from ctl.configs.modes import MODES  # noqa: E402
from ctl.configs.options import name_options  # noqa: E402
from docs.reference import claims  # noqa: E402
from tests.update import combinations  # noqa: E402

PAGES = [*sorted(ROOT.glob("docs/reference/**/*.md")), ROOT / "docs/why-believe-it.md"]
OPTIONS = ROOT / "ctl/configs/options.py"
_OPTIONS = re.compile(r"(    # Generated from the keys [^\n]*\n)(.*?)(    # end\n)", re.DOTALL)
# The names of `import ctl`, by the task for which a reader looks for them: one page each.
_TASKS = {
    "trainer": "StandardTrainer StandardEvaluator TrainerOptions Clip Part SyncBatchNormalization "
    "convert_sync_batch_norm recompute dot_product_attention",
    "own-loop": "Step evaluate Checkpointer",
    "run": "Run config load Action KerasCallback as_action Store UsageError",
}
_MODULES = ("ctl", "ctl.data", "ctl.random", "ctl.ray", "ctl.replica", "ctl.testing")
_GENERATED = re.compile(r"(<!-- generated: ([\w. -]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_NOT_IN_ANCHORS = str.maketrans("", "", "`.")
_MAX_LINE = 100  # characters of a signature in one line
_CODE_LINE = r"^(?: {4}|def |class ).*"  # of an example, which may have lost its indentation


def render_page(text: str) -> str:
    """Returns the text of a page with its generated parts as they are today."""
    return _GENERATED.sub(lambda match: f"{match[1]}\n{_render(match[2])}\n\n{match[3]}", text)


# The fields of `ctl.TrainerOptions`.

_OPTIONS_DOCSTRING = '''\
    """The options of a trainer, in addition to its model, data and optimizer.

        options = ctl.TrainerOptions(seed=1, micro_batches=4, model={"dropout": 0.1})

    Attributes:
%s

    Raises:
        UsageError: an option has a value that is not allowed, or two options contradict each other.
    """

%s
'''
# Not a key: it sets three of them.
_CLIP = (
    "clip: dataclasses.InitVar[Clip | None] = None",
    "A `ctl.Clip`, which sets the three bounds.",
)


def render_options(text: str) -> str:
    """Returns the text of ctl/configs/options.py with the fields that the keys have today.

    The present fields keep their order, since they may be given by position. New ones follow them.
    """
    found = _OPTIONS.search(text)
    assert found
    present = re.findall(r"^    (\w+): ", found[2], re.MULTILINE)
    fields = {"clip": _CLIP} | {key.option: _option_field(key) for key in keys.KEYS if key.option}
    names = [name for name in present if name in fields]
    names += [name for name in fields if name not in names]
    fill = textwrap.TextWrapper(104, " " * 8, " " * 12, break_on_hyphens=False).fill
    lines = [fill(f"{name}: {fields[name][1]}") for name in names]
    statements = "\n".join(f"    {fields[name][0]}" for name in names)
    block = _OPTIONS_DOCSTRING % ("\n".join(lines), statements)
    return text[: found.start()] + found[1] + block + text[found.start(3) :]


def _option_field(key: Key) -> tuple[str, str]:
    """Returns the statement that declares an option, and what it means."""
    kind, default = type(key.default).__name__, repr(key.default).replace("'", '"')
    if key.is_mixed:
        kind = "bool | str"
    if isinstance(key.default, list):
        kind, default = f"Sequence[{key.elements or 'str'}]", "()"
    if isinstance(key.default, dict):
        kind = f"Mapping[str, {key.elements or 'Any'}]"
        default = "dataclasses.field(default_factory=dict)"
    return f"{key.option}: {kind} = {default}", name_options(key.text)


def _render(name: str) -> str:
    if name == "index ctl":
        return _render_tasks()
    if name.startswith("api ctl "):
        names = [f"ctl.{each}" for each in _TASKS[name.removeprefix("api ctl ")].split()]
        return "\n".join([*_render_index(names), *_render_names(names)]).strip()
    if name.startswith("api ctl"):
        return _render_module(name.removeprefix("api "))
    return {
        "config keys": _render_keys,
        "modes": _render_modes,
        "flags": lambda: _table("flag", flags.describe_flags()),
        "commands": lambda: _table(
            "command", {f"ctl {k}": v for k, v in commands.COMMANDS.items()}
        ),
        "combinations": _render_combinations,
        "claims": claims.render,
    }[name]()


# The config keys and the command line.


def _render_keys() -> str:
    """Returns one table per section; the first one has the keys without a section."""
    tables: dict[str, list[str]] = {"": []}
    for key in keys.KEYS:
        section = key.name.partition(".")[0] if "." in key.name else ""
        if not key.is_section:
            tables.setdefault(section, []).append(_key_row(key))
    lines: list[str] = []
    for section, rows in tables.items():
        lines += ["", f"## `{section}`" if section else "## Keys without a section", ""]
        if section and keys.BY_NAME[section].text:
            lines += [_escape_key(keys.BY_NAME[section].text), ""]
        lines += ["| key | type | default | meaning | resume |", "|---|---|---|---|---|", *rows]
    return "\n".join(lines[1:])


def _key_row(key: keys.Key) -> str:
    meaning = _escape_key(key.text)
    if key.free:
        return f"| `{key.name}` | dict | `{{}}` | {meaning} | |"
    resume = "yes" if keys.is_harmless(key.name) else ""
    default = repr(key.default).replace("'", '"')
    return f"| `{key.name}` | {key.type} | `{default}` | {meaning} | {resume} |"


def _escape_key(text: str) -> str:
    return re.sub(r"([*\[\]|<])", r"\\\1", text)


def _render_modes() -> str:
    lines = ["| mode | what it does | flags, besides `--config` |", "|---|---|---|"]
    for name, mode in MODES.items():
        accepted = ", ".join(f"`--{flag}`" for flag in mode.flags)
        lines.append(f"| `{name}` | {_escape_cell(mode.text)} | {accepted} |")
    return "\n".join(lines)


def _render_combinations() -> str:
    """Returns the values that are combined, and the rules with the combinations that each rejects."""
    choices = combinations.all_choices()
    rejected = [broken for choice in choices if (broken := choice.broken())]
    axes = combinations.AXES.items()
    lines = [
        *(f"- {name}: {', '.join(str(v) or 'none' for v in axis)}" for name, axis in axes),
        "",
        f"{len(choices) - len(rejected)} of {len(choices)} combinations are allowed, and compute one",
        "update. The others break a rule of this table. Rules without a number depend on other options,",
        "such as the strategy or the batch size.",
        "",
        "| rejected because | combinations |",
        "|---|---:|",
    ]
    for rule in combinations.NAMED_RULES:
        count = sum(rule in broken for broken in rejected)
        reason = re.sub(r" \([^)]*\{[^)]*\)", "", rule.reason)  # without the values
        lines.append(f"| {reason} | {count or ''} |")
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {title} | what it does |", "|---|---|"]
    return "\n".join(
        lines + [f"| `{name}` | {_escape_cell(text)} |" for name, text in rows.items()]
    )


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# The Python API.


@functools.cache
def _package() -> griffe.Module:
    package = griffe.load("ctl", search_paths=[ROOT], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    return package


def _render_tasks() -> str:
    """Returns a table of the names of `import ctl`, with links to the pages of their tasks."""
    pages = {f"ctl.{name}": page for page, names in _TASKS.items() for name in names.split()}
    assert sorted(pages) == sorted(_public_names("ctl"))
    return "\n".join(_render_index(_public_names("ctl"), pages)).strip()


def _render_index(names: Sequence[str], pages: Mapping[str, str] | None = None) -> list[str]:
    """Returns a table of names with the first paragraphs of their docstrings."""
    lines = ["| name | purpose |", "|---|---|"]
    for name in names:
        page = f"{pages[name]}.md" if pages else ""
        docstring = _resolve(name).docstring
        assert docstring, f"{name} has no docstring."
        summary = " ".join(docstring.value.partition("\n\n")[0].split())
        anchor = _heading(name).lower().replace(" ", "-").translate(_NOT_IN_ANCHORS)
        lines.append(f"| [`{name}`]({page}#{anchor}) | {_escape_cell(summary)} |")
    return [*lines, ""]


def _exports(module: str) -> list[str]:
    """Returns the `__all__` of a module that imports nothing by itself; [] for another module."""
    path = _package().modules_collection[module].filepath
    is_lazy = isinstance(path, pathlib.Path) and "__getattr__" in path.read_text()
    return list(importlib.import_module(module).__all__) if is_lazy else []


def _public_names(module: str) -> list[str]:
    """Returns the full names of the public classes and functions of a module, without submodules."""
    members = _package().modules_collection[module].members
    names = _exports(module) or [
        name
        for name, member in members.items()
        if not name.startswith("_") and not member.is_alias and member.is_function
    ]
    full_names = [f"{module}.{name}" for name in names]
    return [name for name in full_names if name not in _MODULES]


def _resolve(name: str) -> griffe.Object:
    module, _, last = name.rpartition(".")
    modules = _package().modules_collection
    # A submodule of the name of a function hides it.
    item = modules[modules[module].imports.get(last, name) if module else name]
    return item.final_target if isinstance(item, griffe.Alias) else item


def _heading(name: str) -> str:
    """Returns the heading of a class or a function; their names may differ in their case only."""
    return f"class `{name}`" if _resolve(name).is_class else f"`{name}`"


def _render_module(module: str) -> str:
    lines: list[str] = []
    if not _exports(module):  # its docstring describes all functions
        lines += _describe(_resolve(module))
    lines += [*_render_index(_public_names(module)), *_render_names(_public_names(module))]
    return "\n".join(lines).strip()


def _render_names(names: Sequence[str]) -> list[str]:
    """Returns the signatures and docstrings of classes and functions."""
    lines: list[str] = []
    for name in names:
        item = _resolve(name)
        lines += [f"## {_heading(name)}", ""]
        if isinstance(item, griffe.Class):
            lines += _render_class(name, item)
        else:  # a function or a module
            lines += [*(_signature(name, item) if item.is_function else ()), *_describe(item)]
    return lines


def _render_class(name: str, item: griffe.Class) -> Iterator[str]:
    constructor = item.members.get("__init__")
    if constructor is not None:
        yield from _signature(name, constructor)
    yield from _describe(item)
    for method in item.members.values():
        is_public = not method.name.startswith("_") or method.name == "__call__"
        if is_public and (method.is_function or "property" in method.labels):
            yield from (f"### `{name.rpartition('.')[2]}.{method.name}`", "")
            if method.is_function:
                yield from _signature(method.name, method)
            yield from _describe(method)


def _signature(name: str, function: griffe.Object | griffe.Alias) -> list[str]:
    """Returns a code block with a signature, with one argument per line if it is long."""
    parameters, starred = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not starred:
            parameters.append("*")
        starred |= parameter.kind in (
            griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional
        )  # fmt: skip
        parameters.append(_parameter(parameter))
    returned = f" -> {function.returns}" if function.returns and function.name != "__init__" else ""
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > _MAX_LINE:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in parameters), f"){returned}"])
    return ["```python", line, "```", ""]


def _parameter(parameter: griffe.Parameter) -> str:
    stars = {
        griffe.ParameterKind.var_positional: "*",
        griffe.ParameterKind.var_keyword: "**",
    }.get(parameter.kind, "")
    annotation = f": {parameter.annotation}" if parameter.annotation else ""
    name = parameter.name.lstrip("*")
    if stars or parameter.default is None:
        return f"{stars}{name}{annotation}"
    return f"{name}{annotation}{' = ' if annotation else '='}{parameter.default}"


def _describe(item: griffe.Object) -> list[str]:
    """Returns the docstring of a class or a function as Markdown."""
    assert item.docstring, f"{item.path} has no docstring."
    lines: list[str] = []
    for section in item.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            lines += [_escape_text(section.value).rstrip(), ""]
            continue
        lines += [f"**{'Arguments' if kind == 'parameters' else kind.capitalize()}**", ""]
        for entry in section.value:
            text = " ".join(_escape_text(entry.description).split())
            if kind in ("returns", "yields"):
                lines.append(text)
            else:
                lines.append(f"- `{entry.annotation if kind == 'raises' else entry.name}`: {text}")
        lines.append("")
    return lines


def _escape_text(text: str) -> str:
    """Escapes what Markdown would hide, outside of code; makes lists and examples of what they are."""
    text = re.sub(r"^\* ", "- ", text, flags=re.MULTILINE)
    # Markdown takes a list that follows a line of text for more text.
    text = re.sub(r"^((?!- |  ).+)\n(?=- )", r"\1\n\n", text, flags=re.MULTILINE)
    parts = re.split(rf"(`[^`]*`|{_CODE_LINE}$)", text, flags=re.MULTILINE)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*<])", r"\\\1", parts[i])
    example = re.compile(rf"(?:{_CODE_LINE}(?:\n|\Z)|^\n(?={_CODE_LINE}))+", re.MULTILINE)
    fence = "\n```python\n{}\n```\n".format
    return example.sub(lambda match: fence(textwrap.dedent(match[0]).strip("\n")), "".join(parts))


if __name__ == "__main__":
    OPTIONS.write_text(render_options(OPTIONS.read_text()))
    for path in PAGES:
        path.write_text(render_page(path.read_text()))
