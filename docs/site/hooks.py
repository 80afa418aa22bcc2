"""The hooks of mkdocs: pages that are files outside of docs/, and links to them."""

import logging
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Page of the site -> file of the repository, which is read there, too, and so is not in docs/.
COPIES = {
    "gallery.md": "experiments/README.md",
    "build.md": "BUILD.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.ctl")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Appends the pages that mkdocs.yml does not list to its navigation, as the section More."""
    listed = str(config.nav) + "'features.md'"  # for those who change ctl: not on the site
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
    """Makes the links of a page those of the site."""
    source = COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda match: _site_link(match, source, page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lists methods without their class in the right column of the API, which has little room."""
    if page.file.src_uri.startswith("reference/api/"):
        names = [name for heading in page.toc for name in heading.children]
        for method in (method for name in names for method in name.children):
            method.title = method.title.rpartition(".")[2]
    return html


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
        text = re.search("^# (.*)$", (_ROOT / path).read_text(), re.MULTILINE)[1]
    return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor})"
