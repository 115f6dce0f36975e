# SPDX-License-Identifier: Apache-2.0
"""Landmark embedding without hand work: render the neutral rig, detect, cast the landmarks back onto the mesh.

The rig is looked at from several sides; a landmark's place is the weighted mean of what the sides say, moved to the
closest point of the surface that it can belong to (an eyelid point may not sit on the eyeball or on a lash).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.photo import mesh478
from rigfit.photo.landmarks import FaceLandmarks, LandmarkDetector
from rigfit.photo.load import load_photo
from rigfit.render.camera import Camera, look_at, rotation_from_vector
from rigfit.rig.spec import LandmarkEmbedding, RigSpec
from rigfit.rig.surface import cast_pixels, closest_points, in_parts, vertex_normals

# (the way the face looks, up) in the rig frame, likeliest first: Blender's front, then Y-up imports, then the rest.
FRONTS: tuple[tuple[tuple[int, int, int], tuple[int, int, int]], ...] = (
    ((0, -1, 0), (0, 0, 1)),
    ((0, 0, 1), (0, 1, 0)),
    ((0, 1, 0), (0, 0, 1)),
    ((1, 0, 0), (0, 0, 1)),
    ((-1, 0, 0), (0, 0, 1)),
    ((0, 0, -1), (0, 1, 0)),
    ((1, 0, 0), (0, 1, 0)),
    ((-1, 0, 0), (0, 1, 0)),
    ((0, 0, 1), (0, -1, 0)),
)
# Yaw and pitch of the views in degrees.
VIEWS: tuple[tuple[float, float], ...] = (
    (0, 0), (-12, 0), (12, 0), (-28, 0), (28, 0), (0, -12), (0, 12), (-20, 10), (20, 10), (-42, 0), (42, 0),
)  # fmt: skip
VIEW_SIZE_PX, SEARCH_SIZE_PX = 512, 320
DISTANCE_IN_HEADS = 5.0
# A landmark on which the views disagree by this much (face units) is worth half.
HALF_CONFIDENCE = 0.04
NOT_SKIN = ("lash", "brow", "hair", "teeth", "tongue", "eye", "iris")
SEE_THROUGH = ("lash", "brow", "hair")

Progress = Callable[[int, int, str], None]


def face_bounds(spec: RigSpec) -> tuple[NDArray[np.float64], float]:
    """Centre (3,) and size (metres) of what the shapes move: the head, also on a rig with a whole body.

    Weighted by how many shapes move a vertex: only the face is moved by most of them.
    """
    moved = np.bincount(spec.shape_vertices, minlength=len(spec.neutral)).astype(np.float64)
    busy = moved > 0.3 * np.percentile(moved[moved > 0], 95) if (moved > 0).any() else np.ones(len(moved), bool)
    points = spec.neutral[busy].astype(np.float64)
    low, high = np.percentile(points, 1, axis=0), np.percentile(points, 99, axis=0)
    return (low + high) / 2, float(np.max(high - low))


def embed_landmarks(
    worker: BlenderWorker,
    spec_path: Path,
    detector: LandmarkDetector,
    progress: Progress | None = None,
    views: tuple[tuple[float, float], ...] = VIEWS,
    samples: int = 16,
) -> LandmarkEmbedding:
    """Embed the detector's 478 landmarks into the rig that is open in `worker`, whose spec is at `spec_path`.

    All parameters are set to their default first. The file is not written.

    Raises UserError kind ``no_face_on_rig`` when no view shows a face.
    """
    spec = RigSpec.load(spec_path)
    worker.call("rig.apply", spec=str(spec_path), values={p.name: p.default for p in spec.parameters})
    with tempfile.TemporaryDirectory(prefix="rigfit-embed-") as folder:
        picture = Path(folder) / "view.png"

        def look(camera: Camera, quality: int) -> FaceLandmarks | None:
            worker.call(
                "studio.render", camera=camera.to_json(), samples=quality, seed=0, subsurface=False, out=str(picture)
            )
            faces = [f for f in detector.detect(load_photo(picture).image) if f.rotation_deg == 0]
            return faces[0] if faces else None

        centre, size = face_bounds(spec)
        forward, up, found = _find_front(spec, look, centre, size, progress, len(views))
        centre, size = _centre_on(spec, found[0], found[1], size)
        hits: list[NDArray[np.float64]] = []
        weights: list[NDArray[np.float64]] = []
        for i, (yaw, pitch) in enumerate(views):
            if progress:
                progress(i, len(views), "looking at the rig from several sides")
            camera = _view(centre, size, forward, up, yaw, pitch, VIEW_SIZE_PX)
            face = look(camera, samples)
            if face is not None:
                place, weight = _cast(spec, camera, face)
                hits.append(place)
                weights.append(weight)
        if progress:
            progress(len(views), len(views), "landmarks found")
    if not hits:
        raise UserError(
            "The detector finds no face on this rig: check that its materials render, or give landmarks by hand.",
            kind="no_face_on_rig",
        )
    return _combine(spec, np.stack(hits), np.stack(weights))


def _view(centre, size, forward, up, yaw_deg, pitch_deg, size_px) -> Camera:
    """A camera in front of the face, turned about its vertical and horizontal axes."""
    up = np.asarray(up, np.float64)
    into = -np.asarray(forward, np.float64)
    turn = rotation_from_vector(np.radians(yaw_deg) * up)
    side = turn @ np.cross(into, up)
    into = rotation_from_vector(np.radians(pitch_deg) * side) @ turn @ into
    distance = DISTANCE_IN_HEADS * size
    return look_at(centre, into, up, distance, 0.72 * size_px * DISTANCE_IN_HEADS, size_px, size_px)


def _find_front(spec, look, centre, size, progress, total):
    """The first way of looking that shows an upright face → (forward, up, (camera, landmarks))."""
    for i, (forward, up) in enumerate(FRONTS):
        if progress:
            progress(0, total, "finding the face" if i == 0 else f"finding the face, side {i + 1} of {len(FRONTS)}")
        # A rig whose shapes move the whole body hides the face in a small part of the picture: look closer, too.
        for closer in (1.0, 2.2):
            camera = _view(centre, size / closer, forward, up, 0, 0, SEARCH_SIZE_PX)
            face = look(camera, 8)
            if face is not None:
                return forward, up, (camera, face)
    raise UserError(
        "The detector finds no face on this rig from any side: check that the head is visible in a render and its "
        "materials are not black, or give landmarks by hand.",
        kind="no_face_on_rig",
    )


def _centre_on(spec: RigSpec, camera: Camera, face: FaceLandmarks, size: float) -> tuple[NDArray[np.float64], float]:
    """Centre and size of the head from the first sight of its landmarks."""
    hit = cast_pixels(spec.neutral, spec.triangles, camera, face.points_px)
    known = np.isfinite(hit.position).all(axis=1)
    if known.sum() < 100:
        raise UserError(
            "A face is seen on this rig, but not on the meshes that were exported: select all meshes of the head.",
            kind="no_face_on_rig",
        )
    oval = hit.position[[i for i in mesh478.FACE_OVAL if known[i]]]
    extent = float(np.linalg.norm(np.percentile(oval, 98, axis=0) - np.percentile(oval, 2, axis=0)))
    return np.median(hit.position[known], axis=0), max(1.25 * extent, 1e-3 * size)


def _cast(spec: RigSpec, camera: Camera, face: FaceLandmarks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(478,3) places on the mesh and (478,) weights: full when the surface faces the camera, none when it is grazed."""
    solid = ~in_parts(spec, *SEE_THROUGH)
    ids = np.flatnonzero(solid)
    triangles = spec.triangles[ids]
    hit = cast_pixels(spec.neutral, triangles, camera, face.points_px)
    normals = vertex_normals(spec.neutral, spec.triangles)
    normal = np.einsum("nk,nkc->nc", hit.barycentric, normals[triangles[hit.triangle]])
    towards = camera.centre - hit.position
    towards /= np.linalg.norm(towards, axis=1, keepdims=True)
    facing = np.abs(np.sum(normal * towards, axis=1))
    weight = np.where(hit.triangle >= 0, np.clip((facing - 0.2) / 0.6, 0, 1) ** 2, 0.0)
    return hit.position, np.nan_to_num(weight)


def _combine(spec: RigSpec, hits: NDArray[np.float64], weights: NDArray[np.float64]) -> LandmarkEmbedding:
    """hits (views,478,3), weights (views,478) → one embedding; a view far from the median of the views is left out."""
    known = weights > 0.02
    places = np.where(known[:, :, None], hits, np.nan)
    # The frontal view decides where no view is well placed.
    fallback = hits[0]
    with np.errstate(all="ignore"):
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            middle = np.nanmedian(places, axis=0)
    middle = np.where(np.isfinite(middle), middle, fallback)
    eyes = middle[list(mesh478.OUTER_EYE_CORNERS)]
    unit = float(np.linalg.norm(eyes[0] - eyes[1]))
    apart = np.linalg.norm(places - middle, axis=2)
    weight = np.where(known & (apart < 0.15 * unit), weights, 0.0)
    total = weight.sum(axis=0)
    mean = np.einsum("vl,vlc->lc", weight, np.nan_to_num(hits)) / np.maximum(total, 1e-9)[:, None]
    mean = np.where((total > 0)[:, None], mean, middle)
    spread = np.sqrt(np.einsum("vl,vl->l", weight, np.nan_to_num(apart) ** 2) / np.maximum(total, 1e-9))
    confidence = np.where(total > 0, 1 / (1 + (spread / (HALF_CONFIDENCE * unit)) ** 2), 0.25)
    iris = np.zeros(len(mean), bool)
    iris[[*mesh478.RIGHT_IRIS, *mesh478.LEFT_IRIS]] = True
    skin_only = ~in_parts(spec, *NOT_SKIN)
    eye_only = in_parts(spec, "eye", "iris")
    on_skin = closest_points(spec.neutral, spec.triangles, mean, skin_only if skin_only.any() else None)
    on_eye = closest_points(spec.neutral, spec.triangles, mean, eye_only if eye_only.any() else None)
    triangle = np.where(iris, on_eye.triangle, on_skin.triangle)
    barycentric = np.where(iris[:, None], on_eye.barycentric, on_skin.barycentric)
    confidence = np.where(triangle >= 0, confidence, 0.0)
    return LandmarkEmbedding(triangle.astype(np.int32), barycentric.astype(np.float32), confidence.astype(np.float32))
