# SPDX-License-Identifier: Apache-2.0
"""A small face-like rig made of formulas: an ellipsoid head with a nose, for tests that need a rig but no Blender.

The head is 0.18 × 0.22 × 0.26 m, looks along −Y, Z up, and stands at 1.6 m. All 478 landmarks lie on its front.
"""

from __future__ import annotations

import numpy as np
from rigfit.rig.spec import LANDMARK_COUNT, PARTS, LandmarkEmbedding, MeshRange, Parameter, RigSpec, Source

RADII = np.array([0.09, 0.11, 0.13])
CENTRE = np.array([0.0, 0.0, 1.6])


def _sphere(rings: int, segments: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit UV sphere with single poles: vertices, triangles seen counter-clockwise from outside, uv per corner."""
    theta = np.pi * np.arange(1, rings) / rings
    phi = 2 * np.pi * np.arange(segments) / segments
    t, f = np.meshgrid(theta, phi, indexing="ij")
    body = np.stack([np.sin(t) * np.sin(f), -np.sin(t) * np.cos(f), np.cos(t)], axis=-1).reshape(-1, 3)
    vertices = np.concatenate([[[0.0, 0.0, 1.0]], body, [[0.0, 0.0, -1.0]]])
    triangles = []
    for j in range(segments):
        k = (j + 1) % segments
        triangles.append([0, 1 + j, 1 + k])
        for i in range(rings - 2):
            a, b = 1 + i * segments + j, 1 + i * segments + k
            c, d = a + segments, b + segments
            triangles += [[a, c, d], [a, d, b]]
        last = 1 + (rings - 2) * segments
        triangles.append([len(vertices) - 1, last + k, last + j])
    triangles = np.array(triangles)
    # phi grows towards +X, so seen from outside (top pole up) the order above runs counter-clockwise.
    longitude = np.arctan2(vertices[:, 0], -vertices[:, 1]) / (2 * np.pi) + 0.5
    latitude = np.arccos(np.clip(vertices[:, 2], -1, 1)) / np.pi
    uv = np.stack([longitude, 1 - latitude], axis=-1)[triangles]
    return vertices, triangles, uv


def _bump(unit: np.ndarray, x: float, z: float, width: float) -> np.ndarray:
    """(V,) weights of a smooth bump on the front of the unit sphere, centred at (x, z); zero beyond 3 widths."""
    distance2 = (unit[:, 0] - x) ** 2 + (unit[:, 2] - z) ** 2
    weight = np.exp(-distance2 / (2 * width**2)) * np.clip(-unit[:, 1] * 2, 0, 1)
    weight[distance2 > 9 * width**2] = 0
    return weight


def _displacements(unit: np.ndarray, neutral: np.ndarray) -> dict[str, tuple[str, float, float, list[np.ndarray]]]:
    """name → (group, minimum, maximum, one or two (V,3) displacements per unit)."""
    x, y, z = np.eye(3)
    offset = neutral - CENTRE

    def move(weight: np.ndarray, direction: np.ndarray, metres: float) -> np.ndarray:
        return weight[:, None] * direction * metres

    eyes = _bump(unit, -0.35, 0.2, 0.12) + _bump(unit, 0.35, 0.2, 0.12)
    nose, mouth = _bump(unit, 0, -0.05, 0.13), _bump(unit, 0, -0.45, 0.2)
    corners = _bump(unit, 0.3, -0.45, 0.12) - _bump(unit, -0.3, -0.45, 0.12)
    chin = _bump(unit, 0, -0.75, 0.2)
    brows = _bump(unit, -0.35, 0.42, 0.14) + _bump(unit, 0.35, 0.42, 0.14)
    cheeks = _bump(unit, 0.6, -0.15, 0.2) - _bump(unit, -0.6, -0.15, 0.2)
    low = np.clip(-unit[:, 2], 0, 1)
    return {
        "head-width": ("identity", -1, 1, [0.12 * offset * x]),
        "head-length": ("identity", -1, 1, [0.10 * offset * z]),
        "jaw-width": ("identity", -1, 1, [0.15 * offset * x * low[:, None]]),
        "nose-length": ("identity", -1, 1, [move(nose, -y, 0.012), move(nose, -y, 0.008)]),
        "nose-height": ("identity", -1, 1, [move(nose, z, 0.006)]),
        "eye-depth": ("identity", 0, 1, [move(eyes, y, 0.006)]),
        "chin-out": ("identity", 0, 1, [move(chin, -y, 0.010)]),
        "cheek-width": ("identity", 0, 1, [move(cheeks, x, 0.008)]),
        "jawOpen": ("expression", 0, 1, [move(chin + 0.5 * mouth, -z, 0.025)]),
        "smile": ("expression", 0, 1, [move(corners, x, 0.010) + move(np.abs(corners), z, 0.008)]),
        "pucker": ("expression", 0, 1, [move(corners, x, -0.008) + move(mouth, -y, 0.006)]),
        "browUp": ("expression", 0, 1, [move(brows, z, 0.008)]),
        "blink": ("expression", 0, 1, [move(eyes, -z, 0.006)]),
        "mouth": ("expression", -1, 1, [move(mouth, x, 0.008), move(mouth, x, 0.006) + move(mouth, z, 0.001)]),
    }


def _embedding(spec_vertices: np.ndarray, triangles: np.ndarray) -> LandmarkEmbedding:
    """478 points spread evenly (golden angle) over the front, cast along +Y onto the mesh."""
    index = np.arange(LANDMARK_COUNT)
    radius = 0.85 * np.sqrt((index + 0.5) / LANDMARK_COUNT)
    angle = index * np.pi * (3 - np.sqrt(5))
    target = CENTRE[[0, 2]] + np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1) * RADII[[0, 2]]
    corners = spec_vertices[triangles].astype(np.float64)
    flat = corners[:, :, [0, 2]]
    edge1, edge2 = flat[:, 1] - flat[:, 0], flat[:, 2] - flat[:, 0]
    area = edge1[:, 0] * edge2[:, 1] - edge1[:, 1] * edge2[:, 0]
    front = np.flatnonzero((corners[:, :, 1].mean(axis=1) < CENTRE[1]) & (np.abs(area) > 1e-12))
    rel = target[:, None] - flat[front, 0]
    b1 = (rel[..., 0] * edge2[front, 1] - rel[..., 1] * edge2[front, 0]) / area[front]
    b2 = (edge1[front, 0] * rel[..., 1] - edge1[front, 1] * rel[..., 0]) / area[front]
    weights = np.stack([1 - b1 - b2, b1, b2], axis=-1)  # (478, F', 3)
    best = weights.min(axis=-1).argmax(axis=1)
    chosen = np.clip(weights[index, best], 0, None)
    chosen /= chosen.sum(axis=1, keepdims=True)
    return LandmarkEmbedding(
        triangle=front[best].astype(np.int32),
        barycentric=chosen.astype(np.float32),
        confidence=np.linspace(1.0, 0.5, LANDMARK_COUNT).astype(np.float32),
    )


def toy_rig(rings: int = 18, segments: int = 24, *, landmarks: bool = True) -> RigSpec:
    """The rig: 8 identity and 6 expression parameters (two with different shapes on their two sides), 1 appearance."""
    unit, triangles, uv = _sphere(rings, segments)
    neutral = unit * RADII + CENTRE
    neutral[:, 1] -= 0.02 * _bump(unit, 0, -0.05, 0.12)  # a nose, so that depth shows
    parameters, offsets, ids, deltas = [], [0], [], []
    for name, (group, minimum, maximum, sides) in _displacements(unit, neutral).items():
        shapes: list[int | None] = [None, None]
        for side, displacement in enumerate(sides):
            rows = np.flatnonzero(np.abs(displacement).max(axis=1) > 1e-9)
            ids.append(rows)
            deltas.append(displacement[rows])
            shapes[side] = len(offsets) - 1
            offsets.append(offsets[-1] + len(rows))
        sources = [Source("shape_key", "Head", key=name)]
        if len(sides) == 2:
            sources = [
                Source("shape_key", "Head", key=f"{name}-incr", sign=1),
                Source("shape_key", "Head", key=f"{name}-decr", sign=-1),
            ]
        parameters.append(Parameter(name, group, minimum, maximum, 0.0, *shapes, sources=tuple(sources)))
    parameters.append(
        Parameter("skin_tone", "appearance", 0, 1, 0.3, sources=(Source("property", "Head", property="skin_tone"),))
    )
    part = np.full(len(triangles), PARTS.index("skin"), dtype=np.uint8)
    vertices = neutral.astype(np.float32)
    return RigSpec(
        neutral=vertices,
        triangles=triangles.astype(np.int32),
        uv=uv.astype(np.float32),
        part=part,
        shape_offsets=np.array(offsets, dtype=np.int64),
        shape_vertices=np.concatenate(ids).astype(np.int32),
        shape_deltas=np.concatenate(deltas).astype(np.float32),
        parameters=tuple(parameters),
        meshes=(MeshRange("Head", 0, len(vertices), len(vertices)),),
        blender_version="4.5.0",
        source="toy.blend",
        landmarks=_embedding(vertices, triangles) if landmarks else None,
    )
