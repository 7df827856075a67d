"""Charts and pages: valid, self-contained, escaped."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.ui.charts import HEIGHT, WIDTH, Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page, write

ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(points=st.lists(st.tuples(ANY, ANY), max_size=30), log_x=st.booleans(), log_y=st.booleans())
def test_any_points_make_a_valid_drawing_inside_its_frame(
    points: list[tuple[float, float]], log_x: bool, log_y: bool
) -> None:
    text = line_chart([Series("a <b>", points)], Axis("x & y", log_x), Axis("z", log_y))
    root = ElementTree.fromstring(text)
    for line in root.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_a_line_goes_where_its_points_are() -> None:
    text = line_chart([Series("s", [(0, 0), (10, 5)])], Axis("x"), Axis("y"))
    (line,) = ElementTree.fromstring(text).iter("polyline")
    first, last = (tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split())
    assert first[0] < last[0]
    assert first[1] > last[1]


def test_nothing_to_draw_says_so() -> None:
    assert "nothing to draw" in line_chart([Series("s", [(math.nan, 1)])], Axis("x"), Axis("y"))


def test_a_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    chart = line_chart([Series("s", [(0, 1)])], Axis("x"), Axis("y"))
    text = page("<title>", [Section("a & b", [Table(("h",), [("<i>",)])], [("c", chart)], ["<note>"])])
    assert "&lt;title&gt;" in text
    assert "&lt;i&gt;" in text
    assert "&lt;note&gt;" in text
    assert "<svg" in text
    write(tmp_path / "p.html", text)
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "none" / "p.html", text)
