# SPDX-License-Identifier: Apache-2.0
"""A picture of a rig spec: the neutral mesh from three sides with its landmarks on it. No Blender needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from rigfit.photo import mesh478
from rigfit.render.camera import Camera, look_at, rotation_from_vector
from rigfit.rig.spec import RigSpec
from rigfit.rig.surface import points_at, vertex_normals

PANEL_PX = 560
SUPERSAMPLE = 2
PART_COLOURS = {
    "skin": (205, 170, 150), "lips": (190, 110, 110), "eye": (235, 235, 235), "iris": (80, 110, 140), "lash": (40, 36, 34),
    "brow": (84, 60, 44), "teeth": (240, 236, 220), "tongue": (190, 90, 90), "hair": (70, 52, 40), "other": (150, 150, 155),
}  # fmt: skip
SET_COLOURS = {
    "face_oval": (255, 200, 60), "lips_outer": (255, 70, 90), "lips_inner": (255, 140, 150), "right_eye": (70, 220, 255),
    "left_eye": (70, 220, 255), "right_brow": (150, 255, 120), "left_brow": (150, 255, 120), "right_iris": (255, 90, 255),
    "left_iris": (255, 90, 255), "nose": (255, 255, 255),
}  # fmt: skip


def inspect_picture(spec: RigSpec, vertices: NDArray[np.floating] | None = None) -> Image.Image:
    """Three views (from the right, the front, the left) of the rig with its landmarks.

    vertices: (V,3) other than the neutral ones, rig frame, metres. Small dots are landmarks of low confidence.
    """
    vertices = np.asarray(spec.neutral if vertices is None else vertices, np.float64)
    landmarks, confidence = None, None
    forward, up = np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])
    centre = (vertices.min(axis=0) + vertices.max(axis=0)) / 2
    size = float(np.max(vertices.max(axis=0) - vertices.min(axis=0)))
    if spec.landmarks is not None:
        from rigfit.fitting.face_frame import FaceFrame

        landmarks = points_at(vertices, spec.triangles, spec.landmarks.triangle, spec.landmarks.barycentric)
        confidence = spec.landmarks.confidence
        frame = FaceFrame.from_landmarks(landmarks)
        forward, up = frame.axes[2], -frame.axes[1]
        centre, size = np.nanmean(landmarks, axis=0), 2.6 * frame.size
    sheet = Image.new("RGB", (3 * PANEL_PX, PANEL_PX + 34), (28, 28, 30))
    for i, yaw in enumerate((-40, 0, 40)):
        into = rotation_from_vector(np.radians(yaw) * up) @ forward
        size_px = PANEL_PX * SUPERSAMPLE
        camera = look_at(centre, into, up, 6 * size, 6 * size_px * 0.9, size_px, size_px)
        panel = _draw_mesh(spec, vertices, camera)
        if landmarks is not None and confidence is not None:
            _draw_landmarks(panel, camera, vertices, spec, landmarks, confidence)
        sheet.paste(panel.resize((PANEL_PX, PANEL_PX), Image.Resampling.LANCZOS), (i * PANEL_PX, 0))
    embedded = 0 if spec.landmarks is None else int((spec.landmarks.triangle >= 0).sum())
    text = f"{len(vertices):,} vertices · {len(spec.triangles):,} triangles · {len(spec.parameters)} parameters · {embedded} landmarks"
    ImageDraw.Draw(sheet).text((10, PANEL_PX + 7), text, (230, 230, 230), font=ImageFont.load_default(17))
    return sheet


def _draw_mesh(spec: RigSpec, vertices: NDArray[np.float64], camera: Camera) -> Image.Image:
    """Painter's algorithm, shaded by the angle to the camera: good enough for a closed head, quick, no dependency."""
    image = Image.new("RGB", (camera.width, camera.height), (46, 48, 52))
    draw = ImageDraw.Draw(image)
    cam = camera.to_camera(vertices)
    screen = camera.project(vertices)
    normals = vertex_normals(vertices, spec.triangles) @ camera.rotation.T
    corners = cam[spec.triangles]
    facing = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    seen = np.flatnonzero(np.sum(facing * corners[:, 0], axis=1) < 0)
    order = seen[np.argsort(-corners[seen, :, 2].mean(axis=1))]
    shade = np.clip(0.35 + 0.7 * -normals[spec.triangles].mean(axis=1)[:, 2], 0.25, 1.05)
    palette = np.array([PART_COLOURS.get(name, PART_COLOURS["other"]) for name in spec.parts], np.float64)
    colours = np.clip(palette[spec.part] * shade[:, None], 0, 255).astype(int)
    for f in order:
        points = screen[spec.triangles[f]]
        if np.isfinite(points).all():
            draw.polygon([(float(x), float(y)) for x, y in points], fill=tuple(colours[f]))
    return image


def _draw_landmarks(panel, camera: Camera, vertices, spec: RigSpec, landmarks, confidence) -> None:
    draw = ImageDraw.Draw(panel)
    assert spec.landmarks is not None
    corners = vertices[spec.triangles[spec.landmarks.triangle]]
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    towards = np.sum(normal * (camera.centre - landmarks), axis=1) > 0
    colour = np.full((len(landmarks), 3), (190, 190, 255))
    for name, members in mesh478.names().items():
        colour[list(members)] = SET_COLOURS[name]
    pixels = camera.project(landmarks)
    for i in np.flatnonzero(towards & np.isfinite(pixels).all(axis=1)):
        x, y = pixels[i]
        radius = (1.2 + 2.2 * float(confidence[i])) * SUPERSAMPLE
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius),
            fill=tuple(int(c) for c in colour[i]),
            outline=(20, 20, 20),
        )
