"""Polygons, points and point clouds: what is read, and what touches what."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aviso_workers.aviso import spatial
from aviso_workers.aviso.spatial import Box, Containing, Footprint, Intersecting, Point, Polygon

BERLIN = "(52.5,13.4,52.6,13.5,52.5,13.6,52.4,13.5,52.5,13.4)"
BERLIN_PAIRS = [[52.5, 13.4], [52.6, 13.5], [52.5, 13.6], [52.4, 13.5], [52.5, 13.4]]


def polygon(*points: tuple[float, float]) -> Polygon:
    """The polygon with these corners, closed."""
    return spatial.parse_polygon([*map(list, points), list(points[0])])


def rectangle(south: float, west: float, north: float, east: float) -> Polygon:
    return polygon((south, west), (south, east), (north, east), (north, west))


# Reading


@pytest.mark.parametrize(
    "written",
    [
        BERLIN,
        BERLIN.strip("()"),
        BERLIN.replace(",", " , ").replace("(", " ( "),
        BERLIN.replace(",", ",\r\n"),
        json.dumps(BERLIN_PAIRS),
        BERLIN_PAIRS,
        tuple(map(tuple, BERLIN_PAIRS)),
    ],
)
def test_a_polygon_is_read_from_text_and_from_arrays(written: Any) -> None:
    assert spatial.parse_polygon(written).ring == tuple(map(tuple, BERLIN_PAIRS))


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("", "is not a finite number"),
        ("()", "is not a finite number"),
        ("(1,1,2,2,3,3,1,1", "is not a finite number"),
        ("1,1,2,2,3,3,1,1)", "is not a finite number"),
        ("(1,1),(2,2),(3,3),(1,1)", "is not a finite number"),
        ("((1,1,2,2,3,3,1,1))", "is not a finite number"),
        ("(1,1,x,2,3,3,1,1)", "'x' is not a finite number"),
        ("(nan,1,2,2,3,3,nan,1)", "is not a finite number"),
        ("(1,1,2,2,3)", "there are 5 numbers"),
        ("(1,1,2,2,1,1)", "at least 4 pairs"),
        ("(1,1,2,2,3,3,4,4)", "must be repeated last"),
        ("(91,1,2,2,3,3,91,1)", r"latitude 91.0 is outside \[-90, 90\]"),
        ("(1,181,2,2,3,3,1,181)", r"longitude 181.0 is outside \[-180, 180\]"),
        ("[[1,1],[2,2],[3]]", r"not an array of \[lat,lon\]"),
        ("[[1,1],[2,2],[3,true]]", r"not an array of \[lat,lon\]"),
        ("[" * 10_000, r"not an array of \[lat,lon\]"),
        ([1, 1, 2, 2, 3, 3, 1, 1], r"not an array of \[lat,lon\]"),
        ([[float("nan"), 1]] * 4, "latitude nan"),
        ({"type": "Polygon"}, r"not an array of \[lat,lon\]"),
        (None, r"not an array of \[lat,lon\]"),
    ],
)
def test_a_bad_polygon_is_refused(written: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        spatial.parse_polygon(written)


def test_the_edges_of_the_world_are_allowed() -> None:
    assert spatial.parse_polygon("(90,-180,89,-180,89,180,90,-180)").box == Box(south=89, west=-180, north=90, east=180)


@pytest.mark.parametrize("written", ["52.55,13.5", "(52.55,13.5)", " ( 52.55 , 13.5 ) ", [52.55, 13.5], "[52.55,13.5]"])
def test_a_point_is_read_from_text_and_from_arrays(written: list[float] | str) -> None:
    assert spatial.parse_point(written) == (52.55, 13.5)


@pytest.mark.parametrize("written", ["", "52.55", "1,2,3", "1,2,3,4", "91,0", "0,181", [1], [[1, 2]], None, "[1,2"])
def test_a_bad_point_is_refused(written: list[int] | list[list[int]] | str | None) -> None:
    with pytest.raises(ValueError, match=r"."):
        spatial.parse_point(written)


def test_a_point_cloud_keeps_order_and_repetitions() -> None:
    assert spatial.parse_cloud("[[1,2],[1,2],[-3,4.5]]") == [(1, 2), (1, 2), (-3, 4.5)]
    assert spatial.canonical_cloud([[1, 2], [1, 2], [-3, 4.5]]) == "[[1.0,2.0],[1.0,2.0],[-3.0,4.5]]"


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("1,2,3,4", "not an array"),
        ([], "1 to 10000 points, not 0"),
        ([[0, 0]] * 10_001, "1 to 10000 points, not 10001"),
        ([[91, 0]], "latitude 91"),
        ([["1", 2]], "not an array"),
        ([[-89.12345678901234, -179.12345678901235]] * 5000, "up to 61440 bytes"),
    ],
)
def test_a_bad_point_cloud_is_refused(written: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        spatial.canonical_cloud(written)


@given(st.one_of(st.text(), st.text('()[]{},.0123456789-+e \n"')))
def test_text_is_read_or_refused_with_value_error(text: str) -> None:
    for parse in (spatial.parse_polygon, spatial.parse_point, spatial.parse_cloud, Box.parse):
        with suppress(ValueError):
            parse(text)


# Writing


def test_the_header_of_a_bounding_box_has_the_shortest_numbers() -> None:
    assert spatial.parse_polygon(BERLIN).box.header() == "52.4,13.4,52.6,13.6"
    assert rectangle(-1, -0.0000001, 2, 3.50).box.header() == "-1,-0.0000001,2,3.5"


@pytest.mark.parametrize("header", ["52.4,13.4,52.6,13.6", " (52.4, 13.4, 52.6, 13.6) "])
def test_a_bounding_box_is_read_back(header: str) -> None:
    assert Box.parse(header) == spatial.parse_polygon(BERLIN).box


def test_the_text_of_a_polygon_stays_but_line_breaks_go() -> None:
    assert spatial.canonical_polygon(BERLIN) == BERLIN
    assert spatial.canonical_polygon(BERLIN.strip("()")) == BERLIN.strip("()")
    assert spatial.canonical_polygon("( 1, 1,\r\n2,2,\t3,1 ,1,1 )") == "( 1, 1,2,2,3,1 ,1,1 )"


def test_a_polygon_given_as_an_array_is_written_as_text() -> None:
    assert spatial.canonical_polygon(BERLIN_PAIRS) == BERLIN
    assert spatial.canonical_polygon(json.dumps(BERLIN_PAIRS)) == BERLIN
    assert spatial.canonical_polygon([[1.0, 1e-7], [2, 2], [3, 1], [1.0, 1e-7]]) == "(1,0.0000001,2,2,3,1,1,0.0000001)"


# Touching


SQUARE = rectangle(0, 0, 10, 10)
HORSESHOE = polygon((0, 0), (0, 10), (10, 10), (10, 8), (2, 8), (2, 2), (10, 2), (10, 0))


@pytest.mark.parametrize(
    ("point", "inside", "covered"),
    [
        ((5, 5), True, True),
        ((0, 0), False, True),
        ((0, 5), False, True),
        ((10, 10), False, True),
        ((5, 10.000001), False, False),
        ((-1, 5), False, False),
        ((0, 11), False, False),
    ],
)
def test_the_boundary_is_covered_but_not_inside(point: Point, inside: bool, covered: bool) -> None:
    assert (SQUARE.contains(point), SQUARE.covers(point)) == (inside, covered)


def test_a_bay_is_outside() -> None:
    assert not HORSESHOE.covers((5, 5))
    assert HORSESHOE.contains((5, 1))
    assert not HORSESHOE.intersects(rectangle(4, 4, 6, 6))
    assert HORSESHOE.intersects(rectangle(4, 4, 6, 8))
    assert not HORSESHOE.intersects(polygon((10, 4), (10, 6), (14, 1))), "edges on one line, but apart"


def test_what_a_ring_winds_around_twice_is_inside() -> None:
    pentagram = polygon((0, 10), (6, -8), (-10, 3), (10, 3), (-6, -8))
    assert pentagram.contains((0, 0))


@pytest.mark.parametrize(
    ("other", "touches"),
    [
        (rectangle(10, 10, 20, 20), True),
        (rectangle(10, 2, 20, 3), True),
        (rectangle(2, 2, 3, 3), True),
        (rectangle(-5, -5, 50, 50), True),
        (rectangle(10.000001, 0, 20, 10), False),
        (polygon((12, 5), (5, 12), (12, 12)), True),
        (polygon((10.1, 9.91), (9.91, 10.1), (12, 12)), False),
    ],
)
def test_polygons_that_touch_intersect(other: Polygon, touches: bool) -> None:
    assert SQUARE.intersects(other) is touches
    assert other.intersects(SQUARE) is touches


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.6])
def test_one_bit_decides_on_which_side_of_a_slanted_edge_a_point_lies(share: float) -> None:
    below_diagonal = polygon((0, 0), (0.7, 0.7), (0.7, 0))
    on, within, beyond = (share, share), (share, math.nextafter(share, 0)), (share, math.nextafter(share, 1))
    assert below_diagonal.covers(on)
    assert not below_diagonal.contains(on)
    assert below_diagonal.contains(within)
    assert not below_diagonal.covers(beyond)


@pytest.mark.parametrize(
    ("a", "b", "on_the_edge"),
    [
        ((33.7, -52.7), (84.4, -134.5), (38.77, -60.88)),
        ((33.1, 134.8), (-56.7, 70.9), (6.16, 115.63000000000001)),
    ],
)
def test_a_point_on_an_edge_is_on_it_where_plain_floats_say_otherwise(a: Point, b: Point, on_the_edge: Point) -> None:
    (ay, ax), (by, bx), (y, x) = a, b, on_the_edge
    assert (ay - y) * (bx - x) != (ax - x) * (by - y), "rounding"
    for corner in ((ay, bx), (by, ax)):
        triangle = polygon(a, b, corner)
        assert triangle.covers(on_the_edge)
        assert not triangle.contains(on_the_edge)


# A grid with a step that floats cannot hold exactly makes touching corners and shared edges common.
steps = st.integers(-12, 12).map(lambda number: number * 0.1)
points = st.tuples(steps, steps)
anywhere = st.tuples(st.floats(-90, 90), st.floats(-180, 180))
rings = st.lists(points, min_size=3, max_size=7).map(lambda corners: polygon(*corners))
wild_rings = st.lists(anywhere, min_size=3, max_size=6).map(lambda corners: polygon(*corners))


@st.composite
def rectangles(draw: st.DrawFn) -> Polygon:
    (south, north), (west, east) = (sorted(draw(st.lists(steps, min_size=2, max_size=2, unique=True))) for _ in "xy")
    return rectangle(south, west, north, east)


@st.composite
def triangles(draw: st.DrawFn) -> Polygon:
    corners = draw(st.lists(st.one_of(points, anywhere), min_size=3, max_size=3, unique=True))
    assume(_doubled_area(*corners) != 0)
    return polygon(*corners)


@st.composite
def triangles_with_points(draw: st.DrawFn) -> tuple[Polygon, Point]:
    """A triangle and a point, often as close to one of its edges as floats can be, on either side or on it."""
    triangle = draw(triangles())
    (ay, ax), (by, bx) = draw(st.sampled_from(list(pairwise(triangle.ring))))
    share = draw(st.floats(0, 1))
    near = (ay + share * (by - ay), ax + share * (bx - ax))
    return triangle, draw(st.one_of(st.just(near), points, anywhere))


def _doubled_area(a: Point, b: Point, c: Point) -> Fraction:
    ay, ax, by, bx, cy, cx = map(Fraction, (*a, *b, *c))
    return (by - ay) * (cx - ax) - (bx - ax) * (cy - ay)


@given(st.one_of(rings, wild_rings), st.one_of(rings, wild_rings))
def test_intersecting_is_mutual(one: Polygon, other: Polygon) -> None:
    assert one.intersects(other) == other.intersects(one)


@given(st.one_of(rings, wild_rings))
def test_a_polygon_covers_its_corners_and_intersects_itself(ring: Polygon) -> None:
    assert all(ring.covers(corner) and not ring.contains(corner) for corner in ring.ring)
    assert ring.intersects(ring)


@given(rings, rings)
def test_polygons_intersect_if_one_covers_a_corner_of_the_other(one: Polygon, other: Polygon) -> None:
    if any(map(one.covers, other.ring)) or any(map(other.covers, one.ring)):
        assert one.intersects(other)


@given(rings, rings)
def test_where_the_corners_start_and_which_way_they_run_does_not_matter(one: Polygon, other: Polygon) -> None:
    *corners, _ = other.ring
    turned = polygon(*corners[1:], corners[0])
    mirrored = polygon(*reversed(corners))
    assert one.intersects(other) == one.intersects(turned) == one.intersects(mirrored)


@given(rectangles(), rectangles())
def test_rectangles_intersect_as_their_boxes_do(one: Polygon, other: Polygon) -> None:
    assert one.intersects(other) == one.box.intersects(other.box)


@given(rectangles(), st.one_of(points, anywhere))
def test_rectangles_contain_what_lies_between_their_edges(area: Polygon, point: Point) -> None:
    box = area.box
    assert area.contains(point) == (box.south < point[0] < box.north and box.west < point[1] < box.east)
    assert area.covers(point) == box.contains(point)


@given(triangles_with_points())
def test_triangles_contain_what_lies_on_one_side_of_all_edges(triangle_with_point: tuple[Polygon, Point]) -> None:
    triangle, point = triangle_with_point
    sides = [_doubled_area(a, b, point) for a, b in pairwise(triangle.ring)]
    all_left, all_right = all(side >= 0 for side in sides), all(side <= 0 for side in sides)
    assert triangle.covers(point) == (all_left or all_right)
    assert triangle.contains(point) == ((all_left or all_right) and 0 not in sides)


@given(triangles(), triangles())
def test_convex_polygons_are_apart_if_an_edge_separates_them(one: Polygon, other: Polygon) -> None:
    assert one.intersects(other) == (not (_separates(one, other) or _separates(other, one)))


def _separates(one: Polygon, other: Polygon) -> bool:
    """Whether the line through an edge of a triangle has the other polygon strictly on its far side."""
    *corners, _ = one.ring
    for position in range(3):
        a, b, opposite = (corners[(position + step) % 3] for step in range(3))
        inner = _doubled_area(a, b, opposite)
        if all(_doubled_area(a, b, corner) * inner < 0 for corner in other.ring):
            return True
    return False


# Filters


def found(area: Polygon, **footprint: Any) -> bool:
    return Intersecting(area).matches(Footprint(**footprint))


def test_a_polygon_filter_finds_polygons_that_touch_it() -> None:
    area = spatial.parse_polygon(BERLIN)
    near = "(52.52,13.45,52.62,13.55,52.52,13.65,52.42,13.55,52.52,13.45)"
    bbox = spatial.parse_polygon(near).box.header()
    assert found(area, bbox=bbox, geometry=near)
    assert found(area, bbox=bbox, geometry=json.dumps([[52.5, 13.4], [60, 14], [60, 13], [52.5, 13.4]]))
    assert not found(area, bbox="10,10,11,11", geometry=near), "the bounding box decides first"
    assert not found(area, bbox=bbox, geometry="(10,10,11,10,11,11,10,10)")


@pytest.mark.parametrize(
    "footprint",
    [
        {"geometry": BERLIN},
        {"bbox": "52,13,53", "geometry": BERLIN},
        {"bbox": "52,13,53,north", "geometry": BERLIN},
        {"bbox": "52,13,53,14"},
        {"bbox": "52,13,53,14", "geometry": "(somewhere)"},
        {"bbox": "52,13,53,14", "geometry": 42},
        {"bbox": "52,13,53,14", "geometry": {"type": "Point", "coordinates": [52.5, 13.5]}},
        {"bbox": "52,13,53,14", "geometry": {"type": "Polygon", "coordinates": [[[52.5, 13.5]]]}},
        {"bbox": "52,13,53,14", "geometry": {"type": "Polygon", "coordinates": []}},
        {"bbox": "52,13,53,14", "geometry": {"type": "Polygon"}},
        {"bbox": "52,13,53,14", "point_cloud": "[]"},
        {"bbox": "52,13,53,14", "point_cloud": "cloudy"},
    ],
)
def test_a_message_whose_place_is_unknown_is_not_found(footprint: dict[str, Any]) -> None:
    assert not found(spatial.parse_polygon(BERLIN), **footprint)


def test_a_geojson_polygon_in_the_body_is_read_latitude_first_and_closed() -> None:
    area = spatial.parse_polygon(BERLIN)
    geojson = {"type": "Polygon", "coordinates": [[[52.4, 13.4], [52.6, 13.4], [52.6, 13.6]]]}
    assert found(area, bbox="52.4,13.4,52.6,13.6", geometry=geojson)
    swapped = {"type": "Polygon", "coordinates": [[[13.4, 52.4], [13.4, 52.6], [13.6, 52.6]]]}
    assert not found(area, bbox="52.4,13.4,52.6,13.6", geometry=swapped)


@pytest.mark.parametrize(
    ("cloud", "is_found"),
    [
        ([[20, 20], [5, 5]], True),
        ([[0, 5]], True),
        ([[10, 10]], True),
        ([[20, 20], [-1, 5]], False),
    ],
)
def test_a_polygon_filter_finds_clouds_with_a_point_in_it_or_on_its_boundary(
    cloud: list[list[int]], is_found: bool
) -> None:
    box = Box.around([(latitude, longitude) for latitude, longitude in cloud])
    assert found(SQUARE, bbox=box.header(), point_cloud=json.dumps(cloud)) is is_found


@pytest.mark.parametrize(("point", "is_found"), [((5, 5), True), ((0, 5), False), ((10, 10), False), ((11, 5), False)])
def test_a_point_filter_finds_polygons_that_contain_it(point: Point, is_found: bool) -> None:
    text = "(0,0,0,10,10,10,10,0,0,0)"
    assert Containing(point).matches(Footprint(bbox="0,0,10,10", geometry=text)) is is_found
    assert Containing(point).matches(Footprint(geometry=text)) is is_found, "a bounding box is not needed"


def test_a_point_filter_trusts_the_bounding_box_and_needs_a_polygon() -> None:
    assert not Containing((5, 5)).matches(Footprint(bbox="6,6,7,7", geometry="(0,0,0,10,10,10,10,0,0,0)"))
    assert not Containing((5, 5)).matches(Footprint(bbox="0,0,10,10"))
