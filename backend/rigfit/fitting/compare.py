# SPDX-License-Identifier: Apache-2.0
"""The picture people look at: photo | photo with landmarks | render | render over photo, with the numbers under it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rigfit.files import write_atomically
from rigfit.fitting.fit_photos import SeenFace, face_crop
from rigfit.fitting.result import FitResult
from rigfit.photo.face import FaceLandmarks
from rigfit.render.camera import Camera

PANEL_PX, GAP_PX, LINE_PX = 480, 8, 20
OVERLAY = 0.72
INK, PAPER, DETECTED, FITTED = (235, 235, 235), (28, 28, 30), (90, 220, 255), (255, 170, 60)


def comparison(
    seen: SeenFace, result: FitResult, index: int, fitted_px: np.ndarray, render: Path | None
) -> Image.Image:
    """One picture for photo `index`. fitted_px: (478,2) landmarks of the fit in the photo, pixels, NaN where unused."""
    camera = result.photos[index].camera
    crop = face_picture(seen, camera, PANEL_PX)
    marked = with_landmarks(crop, seen.face, camera, fitted_px)
    panels = [("photo", crop), ("landmarks: detected, fitted", marked)]
    if render is not None:
        layer = read_render(render).resize((PANEL_PX, PANEL_PX), Image.Resampling.LANCZOS)
        alone = Image.new("RGBA", layer.size, (*(70, 72, 76), 255))
        alone.alpha_composite(layer)
        panels += [("render", alone.convert("RGB")), ("render over photo", render_over(layer, crop))]
    width = len(panels) * (PANEL_PX + GAP_PX) + GAP_PX
    lines = _lines(result, index, len(panels))
    sheet = Image.new("RGB", (width, PANEL_PX + 2 * GAP_PX + 36 + LINE_PX * len(lines)), PAPER)
    draw = ImageDraw.Draw(sheet)
    title, small = ImageFont.load_default(17), ImageFont.load_default(14)
    for i, (name, panel) in enumerate(panels):
        left = GAP_PX + i * (PANEL_PX + GAP_PX)
        sheet.paste(panel, (left, GAP_PX))
        draw.text((left + 2, PANEL_PX + GAP_PX + 5), name, INK, font=title)
    for row, line in enumerate(lines):
        draw.text((GAP_PX + 2, PANEL_PX + GAP_PX + 32 + row * LINE_PX), line, (180, 182, 186), font=small)
    return sheet


def save_comparison(path: Path, picture: Image.Image) -> None:
    write_atomically(path, lambda temporary: picture.save(temporary, format="PNG"))


def _lines(result: FitResult, index: int, panels: int) -> list[str]:
    photo = result.photos[index]
    yaw, pitch, roll = photo.angles_deg
    focal_mm = photo.camera.focal_px * 36 / max(photo.size_px)
    known = sum(p.identifiable for p in result.parameters.values())
    one = (
        f"landmark error {photo.landmark_error_px:.1f} px = {photo.landmark_error_percent:.1f} % of the eye distance · "
        f"coverage {photo.coverage:.0%} · yaw {yaw:.0f}° pitch {pitch:.0f}° roll {roll:.0f}° · "
        f"focal length {focal_mm:.0f} mm ({photo.focal_from})"
    )
    two = f"{known} of {len(result.parameters)} parameters determined by the photo · solved in {1000 * result.seconds:.0f} ms"
    if photo.verification is not None:
        check = photo.verification
        told = f"{check.landmark_error_percent:.1f} %" if check.landmark_error_percent is not None else "no face found"
        two += f" · landmarks seen on Blender {check.blender_version}'s render: {told}"
    strong = sorted(photo.expression.items(), key=lambda item: -abs(item[1]))[: 5 if panels > 2 else 3]
    three = "expression: " + (", ".join(f"{n} {v:.2f}" for n, v in strong if abs(v) > 0.05) or "neutral")
    room = 60 * panels
    lines = [part for line in (one, two, three) for part in textwrap.wrap(line, room)]
    return lines + photo.warnings[:1]


def face_picture(seen: SeenFace, camera: Camera, size_px: int) -> Image.Image:
    """The square around the face, (size_px, size_px) RGB; black outside the photo. camera: the fitted one."""
    _, (x, y, side) = face_crop(camera, seen.face.box_px, size_px)
    left, top = int(np.floor(x)), int(np.floor(y))
    extent = int(np.ceil(side)) + 2
    canvas = Image.new("RGB", (extent, extent))
    canvas.paste(Image.fromarray(seen.photo.image), (-left, -top))
    box = (x - left, y - top, x - left + side, y - top + side)
    return canvas.resize((size_px, size_px), Image.Resampling.LANCZOS, box=box)


def with_landmarks(picture: Image.Image, face: FaceLandmarks, camera: Camera, fitted_px: np.ndarray) -> Image.Image:
    """A `face_picture` with the detected landmarks and the (478,2) fitted ones (pixels of the photo) drawn in."""
    _, square = face_crop(camera, face.box_px, picture.width)
    picture = picture.copy()
    draw = ImageDraw.Draw(picture)
    grown = picture.width / PANEL_PX
    for points, colour, radius in ((face.points_px, DETECTED, 1.6 * grown), (fitted_px, FITTED, 1.1 * grown)):
        for x, y in (points - square[:2]) * (picture.width / square[2]):
            if np.isfinite(x) and np.isfinite(y):
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return picture


def read_render(path: Path) -> Image.Image:
    """A render of `fit_photos.verify`, RGBA with straight alpha."""
    with Image.open(path) as opened:
        return opened.convert("RGBA")


def render_over(render: Image.Image, picture: Image.Image) -> Image.Image:
    """The render, a little faded, over the `face_picture` of the same size; RGB."""
    over = picture.convert("RGBA")
    faded = render.copy()
    faded.putalpha(render.getchannel("A").point(lambda a: int(a * OVERLAY)))
    over.alpha_composite(faded)
    return over.convert("RGB")
