"""Draws the elements of the pictures, in the colors of a light or a dark page."""

from collections.abc import Sequence
import pathlib
from typing import Any
from xml.sax.saxutils import escape

_STYLE = """\
<style>
text {{ font: {size}px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }}
.muted {{ fill: #59636e; }} .bold {{ font-weight: 600; }}
.middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }}
.box {{ fill: #f3f4f8; stroke: #8b94a3; }} .line {{ fill: none; stroke: #59636e; stroke-width: 1.5; }}
.a {{ fill: #3f51b5; }} .b {{ fill: #c2410c; }} .c {{ fill: #15803d; }}
.sa {{ stroke: #3f51b5; }} .sb {{ stroke: #c2410c; }} .sc {{ stroke: #15803d; }}
.on {{ fill: #fff; }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6e9ef; }} .muted {{ fill: #a3acb9; }}
  .box {{ fill: #262b36; stroke: #77808f; }} .line {{ stroke: #a3acb9; }}
  .a {{ fill: #8c9eff; }} .b {{ fill: #fb923c; }} .c {{ fill: #4ade80; }}
  .sa {{ stroke: #8c9eff; }} .sb {{ stroke: #fb923c; }} .sc {{ stroke: #4ade80; }}
  .on {{ fill: #14171f; }}
}}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path d="M0 0 8 4 0 8z" class="muted"/></marker></defs>"""


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Returns a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    """Returns a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Returns an arrow."""
    return f'<path d="M{x:g} {y:g} {to_x:g} {to_y:g}" class="line" marker-end="url(#tip)"/>'


def curve(points: Sequence[tuple[float, float]], kind: str, extra: str = "") -> str:
    """Returns a line through points."""
    path = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="line {kind}" {extra}/>'


def make(
    title: str,
    width: float,
    height: float,
    elements: Sequence[str],
    size: int = 14,
) -> str:
    """Returns a picture."""
    lines = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'xmlns="http://www.w3.org/2000/svg" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE.format(size=size),
        *elements,
        "</svg>\n",
    ]
    return "\n".join(lines)


def write(path: pathlib.Path, title: str, *arguments: Any, **options: Any) -> None:
    """Writes a picture."""
    path.write_text(make(title, *arguments, **options), encoding="utf-8")
