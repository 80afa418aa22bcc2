"""The hooks of mkdocs: pages that are files outside of docs/, generated tables, and links to both."""

import logging
import pathlib
import posixpath
import re
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# mkdocs imports this file by its path, and not from the root of the repository.
sys.path[:0] = [str(_ROOT), str(_ROOT / "docs/site")]

import api_reference  # noqa: E402
import command_reference  # noqa: E402
import config_reference  # noqa: E402

# Page of the site -> file of the repository, which is read there, too, and so is not in docs/.
COPIES = {
    "index.md": "README.md",
    "gallery.md": "experiments/README.md",
    "kubernetes.md": "deploy/kubernetes/README.md",
    "build.md": "BUILD.md",
    "changelog.md": "CHANGELOG.md",
}
# `<!-- generated: NAME -->` in a page is replaced by the text of a function.
GENERATED = {
    "config keys": config_reference.render,
    "flags": command_reference.render_flags,
    "modes": command_reference.render_modes,
    "commands": command_reference.render_commands,
    "api index": api_reference.render_index,
    **{f"api {module}": api_reference.renderer(module) for module in api_reference.MODULES},
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.ctl")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Appends the pages that mkdocs.yml does not list to its navigation, as the section More."""
    listed = str(config.nav)
    pages = sorted(str(p.relative_to(_ROOT / "docs")) for p in _ROOT.glob("docs/**/*.md"))
    more = [page for page in pages if f"'{page}'" not in listed]
    if more:
        config.nav = [*(config.nav or []), {"More": more}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are files outside of docs/."""
    for page, source in COPIES.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts the generated parts of a page, and makes its links those of the site."""
    for problem in api_reference.missing_docstrings() if page.file.src_uri == "index.md" else ():
        _log.warning(problem)
    source = COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def generate(match: re.Match[str]) -> str:
        if match[1] not in GENERATED:
            _log.warning(f"{source}: there is no generated text {match[1]!r}.")
            return ""
        return GENERATED[match[1]]()

    markdown = re.sub(r"^<!-- generated: (.*) -->$", generate, markdown, flags=re.MULTILINE)
    return _LINK.sub(lambda match: _site_link(match, source, page.file.src_uri), markdown)


def _site_link(link: re.Match[str], source: str, page: str) -> str:
    """Returns a link of a page of the site for a link between files of the repository."""
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if "://" in target or not (_ROOT / path).exists():
        return link[0]
    pages = {file: name for name, file in COPIES.items()}
    if not path.startswith("docs/") and path not in pages:
        _log.warning(f"{source}: {target} is not a page of the site: name the file without a link.")
        return link[0]
    name = pages.get(path, path.removeprefix("docs/"))
    if text.endswith(".md"):  # the name of a file is the title of a page here
        text = (_ROOT / path).read_text().partition("\n")[0].lstrip("# ")
    return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor})"
