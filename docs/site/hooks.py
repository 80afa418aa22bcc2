"""The hooks of mkdocs: pages that are notebooks or files outside of docs/, and links to them."""

import logging
import pathlib
import posixpath
import re
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(_ROOT))

from docs import notebooks  # noqa: E402

# Page of the site -> file of the repository, which is read there, too, and so is not in docs/.
COPIES = {
    "gallery.md": "experiments/README.md",
    "build.md": "BUILD.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_INLINE_CODE = re.compile(r"(?<!<span></span>)<code>[^<]*</code>")  # not a block
_PART = re.compile(r"(?<=\w)[._/=(:]+(?=[a-z])", re.IGNORECASE)  # of a name, which may be a line
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
    for path in notebooks.FOLDER.glob("*.ipynb"):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=notebooks.to_markdown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of a page those of the site; describes it by its first paragraph."""
    page.meta.setdefault("description", describe(markdown))
    source = COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda match: _site_link(match, source, page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks tables of keys and where names break; shortens methods in the right column of the API."""
    html = _INLINE_CODE.sub(lambda match: _PART.sub(r"\g<0><wbr>", match[0]), html)
    if page.file.src_uri == "reference/config.md":
        return f'<div class="keys">{html}</div>'
    if page.file.src_uri.startswith("reference/api/"):
        names = [name for heading in page.toc for name in heading.children]
        for method in (method for name in names for method in name.children):
            method.title = method.title.rpartition(".")[2]
    return html


def describe(markdown: str) -> str:
    """Returns the first paragraph of a page as plain text of at most 160 characters."""
    paragraphs = re.split(
        r"\n\s*\n", re.sub(r"<!--.*?-->|^```.*?^```", "", markdown, flags=re.M | re.S)
    )
    text = next((p for p in paragraphs if re.match(r"[\w`]", p.strip())), "")
    text = re.sub(r"!?\[([^\[\]]*)\]\([^)]*\)", r"\1", text)
    words = " ".join(re.sub("[`*]", "", text).split())
    return words if len(words) <= 160 else f"{words[:157].rpartition(' ')[0]} ..."


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
    if not page.startswith("notebooks/"):  # whose pages link to their files
        name = name.replace(".ipynb", ".md")
    if text.endswith(".md"):  # the name of a file is the title of a page here
        text = re.search("^# (.*)$", (_ROOT / path).read_text(), re.MULTILINE)[1]
    return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor})"
