"""One HTML file that needs nothing else: text, tables, figures for light and dark pages, provenance."""

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from quads.lab import style

CSS = """
:root { --paper: #ffffff; --ink: #222222; --soft: #5b6470; --line: #dde1e6; --shade: #f5f7f9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #d8dee6; --soft: #98a2ae; --line: #2c333b; --shade: #1b2127; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.2rem 4rem; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.6rem 0; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.4rem; padding-top: 0.8rem; border-top: 1px solid var(--line); }
p, ul { max-width: 46rem; }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.1rem; margin: 1rem 0; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.figure { overflow-x: auto; margin: 1rem 0; }
img { display: block; width: 100%; min-width: 44rem; height: auto; }
.label { font-size: 0.8rem; font-weight: 600; letter-spacing: 0.04em; text-transform: uppercase; color: var(--soft);
  margin: 0.9rem 0 0; }
.label + p { margin-top: 0.1rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; background: var(--shade); }
details { font-size: 0.85rem; color: var(--soft); margin-top: 0.4rem; }
summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--shade); padding: 0.7rem; font-size: 0.78rem; line-height: 1.45; }
code { font-size: 0.88em; }
"""


@dataclass
class Section:
    """One analysis. `tables` is Markdown: paragraphs and tables."""

    name: str
    title: str
    shows: str
    reading: str
    draw: Callable[[], Figure]
    tables: str
    about: dict[str, Any]
    batch: dict[str, Any] | None


def write(path: Path, about: str, sections: Sequence[Section]) -> Path:
    """The page. `about` is the text above everything: paragraphs separated by empty lines, the first one the title."""
    title, *paragraphs = about.strip().split("\n\n")
    links = "".join(f'<a href="#{s.name}">{html.escape(s.title)}</a>' for s in sections)
    body = "".join(f"<p>{_inline(text)}</p>" for text in paragraphs)
    parts = "".join(_section(section) for section in sections)
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{html.escape(title)}</title>\n<style>{CSS}</style>\n'
        f"</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n<nav>{links}</nav>\n{parts}</body>\n</html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _section(section: Section) -> str:
    light, dark = _image(section.draw()), _image(style.darken(section.draw()))
    picture = (
        f'<div class="figure"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{html.escape(section.title)}"></picture></div>'
    )
    return (
        f'<section id="{section.name}">\n<h2>{html.escape(section.title)}</h2>\n'
        f'<p class="label">What is shown</p><p>{_inline(section.shows)}</p>\n{picture}\n'
        f'<p class="label">What follows</p><p>{_inline(section.reading)}</p>\n'
        f"<details><summary>Numbers</summary>{markdown_to_html(section.tables)}</details>\n"
        f"<details><summary>Provenance</summary>{_provenance(section)}</details>\n</section>\n"
    )


def _provenance(section: Section) -> str:
    about = dict(section.about)
    config = about.pop("config", "")
    facts = {**about, **{f"batch: {key}": value for key, value in (section.batch or {}).items()}}
    rows = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(_plain(value))}</td></tr>"
        for key, value in facts.items()
    )
    text = f"<pre>{html.escape(config)}</pre>" if config else ""
    return f'<div class="scroll"><table>{rows}</table></div>{text}'


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _image(figure: Figure) -> str:
    """A PNG as a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _inline(text: str) -> str:
    """Escaped text with `code` and **strong**."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def markdown_to_html(text: str) -> str:
    """Paragraphs and pipe tables, which is all that the lab writes."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("| "):
            header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            blocks.append(f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>')
        elif lines:
            blocks.append(f"<p>{_inline(' '.join(lines))}</p>")
    return "".join(blocks)
