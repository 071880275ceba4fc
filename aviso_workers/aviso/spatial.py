"""Polygons, points and point clouds: reading them, and which stored ones a filter lets through.

`schema` checks identifier values and prepares filters with this module; `codec` takes the header text of a
bounding box from it and hands over what a stored message says of its place as a `Footprint`, which is
parsed only when a filter asks, and no further than the bounding box where that decides.

All arithmetic is planar on latitude and longitude, as in aviso-server: no antimeridian, no poles, no
holes. Whether a point lies on an edge is decided exactly, because "touching counts" (polygons, point
clouds) and "the boundary does not count" (points) mean nothing otherwise: see `_turn`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Self, TypeGuard

import msgspec

from aviso_workers.aviso import literals

Point = tuple[float, float]
"""Latitude and longitude in degrees, in this order."""

MAX_POINTS = 10_000
"""The most points that aviso-server takes in one point cloud. We take no more in a polygon either: what a message says
of its place is compared with each filter, whoever has written it."""

_LARGEST_CLOUD_BYTES = 60 * 1024
_LONGEST_BOX = 4 * 400
"""Characters: the longest spelling of a number in degrees, without an exponent, has about 350."""
_BLANKS_BUT_SPACE = re.compile(r"[^\S ]+")

# Shewchuk, "Adaptive Precision Floating-Point Arithmetic" (1997): a float determinant above this share of
# its terms has the right sign, unless they underflow, for which places would have to be 1e-150 degrees apart.
_ROUNDING = 3.3306690738754716e-16


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A bounding box in degrees; its edges belong to it."""

    south: float
    west: float
    north: float
    east: float

    @classmethod
    def around(cls, points: Iterable[Point]) -> Self:
        """Return the smallest box that holds all of at least one point."""
        latitudes, longitudes = zip(*points, strict=True)
        return cls(south=min(latitudes), west=min(longitudes), north=max(latitudes), east=max(longitudes))

    @classmethod
    def parse(cls, header: str) -> Self:
        """Read a `spatial_bbox` header. Raises ValueError."""
        if len(header) > _LONGEST_BOX:
            raise ValueError(f"a bounding box has up to {_LONGEST_BOX} characters, not {len(header)}")
        numbers = [literals.parse_float(part.strip()) for part in header.strip().strip("()").split(",")]
        if len(numbers) != 4:
            raise ValueError(f"a bounding box has 4 numbers, not {len(numbers)}")
        south, west, north, east = numbers
        return cls(south=south, west=west, north=north, east=east)

    def header(self) -> str:
        """Return the value of the `spatial_bbox` header: `min_lat,min_lon,max_lat,max_lon`."""
        return ",".join(map(literals.float_text, (self.south, self.west, self.north, self.east)))

    def contains(self, point: Point) -> bool:
        """Return whether `point` lies in the box or on its edge."""
        return self.south <= point[0] <= self.north and self.west <= point[1] <= self.east

    def intersects(self, other: Box) -> bool:
        """Return whether the boxes share at least a point."""
        return (
            self.south <= other.north
            and other.south <= self.north
            and self.west <= other.east
            and other.west <= self.east
        )


class Polygon(msgspec.Struct, frozen=True):
    """A closed ring of at least four points, the first repeated last; inside is what it winds around."""

    ring: tuple[Point, ...]
    box: Box

    def contains(self, point: Point) -> bool:
        """Return whether `point` lies inside; on the boundary is not inside."""
        return self.box.contains(point) and _side(self.ring, point) > 0

    def covers(self, point: Point) -> bool:
        """Return whether `point` lies inside or on the boundary."""
        return self.box.contains(point) and _side(self.ring, point) >= 0

    def intersects(self, other: Polygon) -> bool:
        """Return whether the polygons share at least a point; touching counts.

        Compares every edge of one with every edge of the other inside the box that both share.
        """
        if not self.box.intersects(other.box):
            return False
        # Where no edges meet, each ring lies wholly on one side of the other: any corner tells which.
        if other.covers(self.ring[0]) or self.covers(other.ring[0]):
            return True
        mine, theirs = self._edges_near(other.box), other._edges_near(self.box)
        return any(near.intersects(far) and _segments_meet(a, b, c, d) for a, b, near in mine for c, d, far in theirs)

    def _edges_near(self, box: Box) -> list[tuple[Point, Point, Box]]:
        edges = ((a, b, Box.around((a, b))) for a, b in pairwise(self.ring))
        return [edge for edge in edges if box.intersects(edge[2])]


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stored message says that it lies, in its own words; the methods read them.

    `bbox` and `point_cloud` are the headers `spatial_bbox` and `spatial_point_cloud`. `geometry` is the
    header `spatial_geometry` or, where that is missing, the entry of this name in the body: text, or an
    array of pairs, or a GeoJSON Polygon in aviso-server's reading of it, that is (latitude, longitude).
    """

    bbox: str | None = None
    geometry: object = None
    point_cloud: str | None = None

    def box(self) -> Box | None:
        """Return the bounding box; None if it is missing or cannot be read."""
        with suppress(ValueError):
            return None if self.bbox is None else Box.parse(self.bbox)
        return None

    def polygon(self) -> Polygon | None:
        """Return the polygon; None if it is missing or cannot be read."""
        try:
            if isinstance(self.geometry, Mapping):
                return _parse_geojson(self.geometry)
            return parse_polygon(self.geometry)
        except ValueError:
            return None

    def cloud(self) -> list[Point]:
        """Return the point cloud; empty if it is missing or cannot be read."""
        with suppress(ValueError):
            return parse_cloud(self.point_cloud)
        return []


class Intersecting(msgspec.Struct, frozen=True):
    """The filter `polygon`: polygons that touch `area`, and clouds with a point in it or on its boundary."""

    area: Polygon

    def matches(self, footprint: Footprint) -> bool:
        """Return whether the message's place is known and meets the area; a missing bounding box is unknown."""
        box = footprint.box()
        if box is None or not box.intersects(self.area.box):
            return False
        if footprint.point_cloud is not None:
            return any(map(self.area.covers, footprint.cloud()))
        polygon = footprint.polygon()
        return polygon is not None and self.area.intersects(polygon)


class Containing(msgspec.Struct, frozen=True):
    """The filter `point`: polygons with `point` inside; one on whose boundary it lies does not match."""

    point: Point

    def matches(self, footprint: Footprint) -> bool:
        """Return whether the message's polygon is known and contains the point."""
        box = footprint.box()
        if box is not None and not box.contains(self.point):
            return False
        polygon = footprint.polygon()
        return polygon is not None and polygon.contains(self.point)


Filter = Intersecting | Containing


def parse_polygon(value: object) -> Polygon:
    """Read `(lat,lon,lat,lon,...)`, parentheses optional, or an array of pairs, or such an array as text.

    Raises ValueError unless it is a closed ring of 4 to `MAX_POINTS` pairs (the first repeated last), all
    within [-90, 90] and [-180, 180] degrees.
    """
    points = _in_range(_pairs_of(value) if _is_plain_text(value) else _array(value, list[Point]))
    if not 4 <= len(points) <= MAX_POINTS:
        raise ValueError(
            f"a polygon needs at least 4 pairs, the first repeated last, and at most {MAX_POINTS}, not {len(points)}"
        )
    if points[0] != points[-1]:
        raise ValueError("the first pair of a polygon must be repeated last")
    return _polygon(points)


def canonical_polygon(value: object) -> str:
    """Return the identifier text of a polygon: as it was written, or `(lat,lon,...)` if that was an array.

    Blanks other than spaces are taken out, because the text becomes a header, where a line break would
    start the next one. Raises ValueError as `parse_polygon`.
    """
    polygon = parse_polygon(value)
    if _is_plain_text(value):
        return _BLANKS_BUT_SPACE.sub("", value)
    return f"({','.join(literals.float_text(number) for point in polygon.ring for number in point)})"


def parse_point(value: object) -> Point:
    """Read `lat,lon` or `(lat,lon)`, or an array of the two, or such an array as text. Raises ValueError."""
    points = _pairs_of(value) if _is_plain_text(value) else [_array(value, Point)]
    if len(points) != 1:
        raise ValueError(f"a point is one pair 'lat,lon', not {len(points)}")
    return _in_range(points)[0]


def parse_cloud(value: object, max_points: int = MAX_POINTS) -> list[Point]:
    """Read an array of at least one pair, or such an array as text. Raises ValueError."""
    points = _in_range(_array(value, list[Point]))
    if not 1 <= len(points) <= max_points:
        raise ValueError(f"a point cloud has 1 to {max_points} points, not {len(points)}")
    return points


def with_arrays(identifier: Mapping[str, str]) -> dict[str, Any]:
    """Return the identifier with its polygon and its point cloud as arrays of pairs, unless they cannot be read."""
    points_of: dict[str, Callable[[str], Iterable[Point]]] = {
        "polygon": lambda text: parse_polygon(text).ring,
        "point_cloud": parse_cloud,
    }
    found: dict[str, Any] = dict(identifier)
    for field in points_of.keys() & identifier.keys():
        with suppress(ValueError):
            found[field] = [list(point) for point in points_of[field](identifier[field])]
    return found


def canonical_cloud(value: object, max_points: int = MAX_POINTS) -> str:
    """Return the identifier text of a point cloud: `[[lat,lon],...]`, in the order given.

    Raises ValueError as `parse_cloud`, and for more than 60 KiB, which is aviso-server's limit.
    """
    text = msgspec.json.encode(parse_cloud(value, max_points)).decode()
    if len(text) > _LARGEST_CLOUD_BYTES:
        raise ValueError(f"a point cloud takes up to {_LARGEST_CLOUD_BYTES} bytes as text, not {len(text)}")
    return text


def _polygon(points: list[Point]) -> Polygon:
    return Polygon(tuple(points), Box.around(points))


def _parse_geojson(value: Mapping[str, Any]) -> Polygon:
    """Return the outer ring of a GeoJSON Polygon, closed if it is open."""
    rings = _array(value.get("coordinates"), list[list[Point]]) if value.get("type") == "Polygon" else []
    if not rings or not 3 <= len(rings[0]) < MAX_POINTS:
        raise ValueError(f"no GeoJSON Polygon with an outer ring of 3 pairs or more, and less than {MAX_POINTS}")
    points = _in_range(rings[0])
    return _polygon(points if points[0] == points[-1] else [*points, points[0]])


def _is_plain_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and not value.lstrip().startswith("[")


def _pairs_of(text: str) -> list[Point]:
    stripped = text.strip()
    if stripped.startswith("(") and stripped.endswith(")"):
        stripped = stripped[1:-1]
    parts = stripped.split(",", 2 * MAX_POINTS)
    if len(parts) > 2 * MAX_POINTS:
        raise ValueError(f"there are more than {MAX_POINTS} points")
    numbers = [literals.parse_float(part.strip()) for part in parts]
    if len(numbers) % 2:
        raise ValueError(f"coordinates come in pairs 'lat,lon', but there are {len(numbers)} numbers")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _array(value: object, shape: Any) -> Any:
    """Read an array, or its JSON text, whose values must have the given types."""
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=shape)
        return msgspec.convert(value, shape)
    except msgspec.MsgspecError as problem:
        raise ValueError(f"not an array of [lat,lon]: {problem}") from problem


def _in_range(points: list[Point]) -> list[Point]:
    for latitude, longitude in points:
        if not -90 <= latitude <= 90:
            raise ValueError(f"latitude {latitude} is outside [-90, 90]")
        if not -180 <= longitude <= 180:
            raise ValueError(f"longitude {longitude} is outside [-180, 180]")
    return points


def _side(ring: tuple[Point, ...], point: Point) -> int:
    """1 if the ring winds around `point`, 0 if `point` lies on it, else -1."""
    latitude, longitude = point
    winding = 0
    for a, b in pairwise(ring):
        if not min(a[0], b[0]) <= latitude <= max(a[0], b[0]):
            continue
        turn = _turn(a, b, point)
        if turn == 0 and min(a[1], b[1]) <= longitude <= max(a[1], b[1]):
            return 0
        # An edge owns its lower end and not its upper one, so that a ray through a vertex counts once.
        if a[0] <= latitude < b[0] and turn > 0:
            winding += 1
        elif b[0] <= latitude < a[0] and turn < 0:
            winding -= 1
    return 1 if winding else -1


def _segments_meet(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return whether the segments ab and cd, whose boxes intersect, share at least a point."""
    return _turn(a, b, c) * _turn(a, b, d) <= 0 and _turn(c, d, a) * _turn(c, d, b) <= 0


def _turn(a: Point, b: Point, c: Point) -> int:
    """Return which way the path from `a` over `b` to `c` turns: 1 or -1, or 0 if it goes straight on.

    Exact: the float determinant is trusted only where rounding cannot have changed its sign.
    """
    left, right = (a[0] - c[0]) * (b[1] - c[1]), (a[1] - c[1]) * (b[0] - c[0])
    if abs(left - right) > _ROUNDING * (abs(left) + abs(right)):
        return 1 if left > right else -1
    # Whole numbers of the finest unit among them. Fractions would be reduced in each step, which takes a hundred times
    # as long where they are next to nothing, and others choose them.
    ratios = [degrees.as_integer_ratio() for degrees in (*a, *b, *c)]
    unit = max(denominator for _, denominator in ratios)  # each is a power of two
    ay, ax, by, bx, cy, cx = (numerator * (unit // denominator) for numerator, denominator in ratios)
    exact = (ay - cy) * (bx - cx) - (ax - cx) * (by - cy)
    return (exact > 0) - (exact < 0)
