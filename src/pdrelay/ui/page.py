"""Reports as one HTML file: headings, tables, charts, notes; nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from pdrelay.errors import ConfigError


class Table(NamedTuple):
    """Rows of text; the first `names` columns are words, the others figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    names: int = 1


class Section(NamedTuple):
    """A heading with tables, charts (SVG), sentences and a text as a terminal shows it under it."""

    title: str
    tables: Sequence[Table] = ()
    charts: Sequence[tuple[str, str]] = ()  # caption, SVG
    notes: Sequence[str] = ()
    text: str = ""


_PAGE = """{% macro cells(tag, row, names) %}{% for cell in row %}
<{{ tag }}{% if loop.index <= names %} class="name"{% endif %}>{{ cell }}</{{ tag }}>{% endfor %}{% endmacro -%}
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; background: #fff; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; }
th, td { padding: .22rem .6rem; text-align: right; border-bottom: 1px solid #e6e6e6; }
td:not(.name) { white-space: nowrap; }
.name { text-align: left; } th { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { width: 100%; height: auto; }
.note { color: #444; max-width: 80ch; }
pre { font-size: .8rem; line-height: 1.4; white-space: pre-wrap; }
</style></head><body>
<h1>{{ title }}</h1>
{% for section in sections %}<section><h2>{{ section.title }}</h2>
{% for note in section.notes %}<p class="note">{{ note }}</p>
{% endfor %}{% for table in section.tables %}<table><thead>
<tr>{{ cells("th", table.head, table.names) }}</tr></thead><tbody>
{% for row in table.rows %}<tr>{{ cells("td", row, table.names) }}</tr>
{% endfor %}</tbody></table>
{% endfor %}{% if section.text %}<pre>{{ section.text }}</pre>{% endif %}
{% if section.charts %}<div class="charts">{% for caption, svg in section.charts %}
<figure><figcaption>{{ caption }}</figcaption>{{ svg }}</figure>{% endfor %}</div>{% endif %}</section>
{% endfor %}</body></html>
"""


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole file. All text is escaped; charts are taken as they are."""
    safe = [
        section._replace(charts=[(caption, Markup(svg)) for caption, svg in section.charts])  # noqa: S704 - our own SVG
        for section in sections
    ]
    return Environment(autoescape=True).from_string(_PAGE).render(title=title, sections=safe)


def write(path: Path, text: str) -> None:
    """Writes a report. Raises ConfigError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
