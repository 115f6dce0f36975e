# SPDX-License-Identifier: Apache-2.0
"""A mask with a human face's proportions: the standard face's landmarks are its vertices, and smooth bumps its shapes.

For tests of the fit that need landmarks where a face has them. Eye corners 90 mm apart, looks along −Y, Z up.
"""

from __future__ import annotations

import numpy as np
from rigfit.photo import mesh478
from rigfit.photo.align import standard_face
from rigfit.render.camera import Camera
from rigfit.rig.spec import PARTS, LandmarkEmbedding, Parameter, RigSpec
from scipy.spatial import Delaunay

EYE_DISTANCE = 0.09
# name, group, minimum, centre landmark, reach (eye distances), direction (rig frame), size (metres)
BUMPS = (
    ("nose-width", "identity", -1, 1, 0.25, "x", 0.010),
    ("nose-length", "identity", -1, 1, 0.3, (0, 0, -1), 0.012),
    ("nose-depth", "identity", -1, 1, 0.25, (0, -1, 0), 0.012),
    ("mouth-width", "identity", -1, 13, 0.35, "x", 0.012),
    ("mouth-height", "identity", -1, 13, 0.3, (0, 0, 1), 0.008),
    ("chin-length", "identity", -1, 152, 0.5, (0, 0, -1), 0.015),
    ("jaw-width", "identity", -1, 152, 0.7, "x", 0.020),
    ("eye-distance", "identity", -1, 168, 0.6, "x", 0.012),
    ("eye-height", "identity", -1, 168, 0.5, (0, 0, 1), 0.008),
    ("cheek-depth", "identity", -1, 205, 0.5, (0, -1, 0), 0.012),
    ("forehead-width", "identity", -1, 10, 0.7, "x", 0.015),
    ("ancestry", "identity", 0, 5, 0.9, (0, -1, 0), 0.010),
    ("jawOpen", "expression", 0, 17, 0.45, (0, 0, -1), 0.030),
    ("mouthSmileLeft", "expression", 0, 291, 0.25, (0.6, 0, 0.8), 0.014),
    ("mouthSmileRight", "expression", 0, 61, 0.25, (-0.6, 0, 0.8), 0.014),
    ("browUp", "expression", 0, 9, 0.6, (0, 0, 1), 0.012),
    ("eyeBlinkLeft", "expression", 0, 386, 0.14, (0, 0, -1), 0.009),
    ("eyeBlinkRight", "expression", 0, 159, 0.14, (0, 0, -1), 0.009),
)


def mask_rig(
    scale: float = 1.0, rotation: np.ndarray | None = None, offset: tuple[float, float, float] = (0, 0, 0)
) -> RigSpec:
    """scale, rotation, offset: place the same mask elsewhere in the rig frame (centimetres, Y up, …)."""
    face = standard_face()
    corners = face[list(mesh478.OUTER_EYE_CORNERS)]
    face = face / np.linalg.norm(corners[1] - corners[0])
    points = np.stack([face[:, 0], face[:, 2], -face[:, 1]], axis=1) * EYE_DISTANCE
    triangles = Delaunay(points[:, [0, 2]]).simplices
    normal = np.cross(
        points[triangles[:, 1]] - points[triangles[:, 0]], points[triangles[:, 2]] - points[triangles[:, 0]]
    )
    triangles[normal[:, 1] > 0] = triangles[normal[:, 1] > 0][:, ::-1]
    turn = np.eye(3) if rotation is None else rotation
    place = lambda v: scale * v @ turn.T  # noqa: E731
    ids, deltas, offsets, parameters = [], [], [0], []
    for name, group, minimum, centre, reach, direction, size in BUMPS:
        d2 = np.sum((points - points[centre]) ** 2, axis=1) / (reach * EYE_DISTANCE) ** 2
        weight = np.exp(-d2)
        if direction == "x":
            move = np.stack([np.tanh(points[:, 0] / 0.02), np.zeros(len(points)), np.zeros(len(points))], axis=1)
        else:
            move = np.tile(np.asarray(direction, float), (len(points), 1))
        delta = weight[:, None] * move * size
        # One is a signed parameter made of two keys that are not mirror images of each other.
        shapes = [delta, delta * np.array([0.7, 0, 0])] if name == "mouth-width" else [delta]
        first = len(offsets) - 1
        for shape in shapes:
            moved = np.flatnonzero(np.linalg.norm(shape, axis=1) > 1e-5)
            ids.append(moved)
            deltas.append(place(shape[moved]))
            offsets.append(offsets[-1] + len(moved))
        parameters.append(Parameter(name, group, minimum, 1.0, 0.0, first, first + 1 if len(shapes) > 1 else None))
    parameters.append(Parameter("skin_tone", "appearance", 0.0, 1.0, 0.3))
    # A landmark is a corner of a triangle.
    triangle, barycentric = np.full(478, -1, np.int32), np.zeros((478, 3), np.float32)
    for slot in range(3):
        triangle[triangles[:, slot]] = np.arange(len(triangles))
        barycentric[triangles[:, slot]] = np.eye(3, dtype=np.float32)[slot]
    return RigSpec(
        neutral=(place(points) + np.asarray(offset)).astype(np.float32),
        triangles=triangles.astype(np.int32),
        uv=np.zeros((len(triangles), 3, 2), np.float32),
        part=np.full(len(triangles), PARTS.index("skin"), np.uint8),
        shape_offsets=np.array(offsets, np.int64),
        shape_vertices=np.concatenate(ids).astype(np.int32),
        shape_deltas=np.concatenate(deltas).astype(np.float32),
        parameters=tuple(parameters),
        landmarks=LandmarkEmbedding(triangle, barycentric, np.ones(478, np.float32)),
    )


def random_values(spec: RigSpec, rng: np.random.Generator, strength: float = 0.6) -> np.ndarray:
    """(P,) values inside the limits: identity uniform, a few expressions, appearance at its default."""
    values = spec.default.copy()
    for j, p in enumerate(spec.parameters):
        if p.group == "identity":
            values[j] = rng.uniform(max(p.minimum, -strength), strength)
        elif p.group == "expression" and rng.random() < 0.4:
            values[j] = rng.uniform(0.2, 0.9)
    return values


def camera_for(
    spec: RigSpec, yaw_deg: float = 0, pitch_deg: float = 0, roll_deg: float = 0, *, width: int = 640, height: int = 480,
    face_px: float = 140.0, focal_px: float = 1100.0, shift_px: tuple[float, float] = (0, 0),
) -> Camera:  # fmt: skip
    """A camera in which the eye distance of the frontal face is `face_px` pixels."""
    from rigfit.fitting.face_frame import FaceFrame, landmark_model, rotation_from_angles

    frame = FaceFrame.from_landmarks(landmark_model(spec).neutral)
    angles = np.radians([yaw_deg, pitch_deg, roll_deg])
    distance = focal_px / face_px
    translation = np.array([shift_px[0] / face_px, shift_px[1] / face_px, distance])
    rotation, translation = frame.camera_to_rig(rotation_from_angles(*angles), translation)
    return Camera(width, height, focal_px, np.array([width / 2, height / 2]), rotation, translation)
