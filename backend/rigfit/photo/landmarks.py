# SPDX-License-Identifier: Apache-2.0
"""The landmarks of the face that is meant: detect, choose, refuse in words.

This is the module to import from; detection is in ``detector``, files in ``landmark_file``, names in ``mesh478``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rigfit.errors import UserError
from rigfit.photo.detector import LandmarkDetector, MediapipeDetector
from rigfit.photo.face import FaceLandmarks
from rigfit.photo.landmark_file import load_landmark_file, save_landmark_file
from rigfit.photo.load import Photo

__all__ = [
    "MIN_FACE_PX",
    "DetectedFace",
    "FaceLandmarks",
    "LandmarkDetector",
    "MediapipeDetector",
    "choose_face",
    "detect_face",
    "load_landmark_file",
    "save_landmark_file",
]

MIN_FACE_PX = 40.0


@dataclass(frozen=True)
class DetectedFace(FaceLandmarks):
    """The chosen face; faces_found: how many there are on the photo; index: which one this is (0 is the largest)."""

    faces_found: int = 1
    index: int = 0


def choose_face(faces: Sequence[FaceLandmarks], index: int | None = None) -> FaceLandmarks:
    """The face number ``index``, or the first (the largest) one.

    Raises UserError: ``no_face`` if there is none, ``no_such_face`` if the number is too large, ``face_too_small`` if
    the chosen face is narrower than 40 pixels.
    """
    if not faces:
        raise UserError(
            "No face was found on this photo: give one on which the face is larger and seen from the front or "
            "obliquely, or give the landmarks in a file.",
            kind="no_face",
        )
    if index is not None and not 0 <= index < len(faces):
        count = "is 1 face" if len(faces) == 1 else f"are {len(faces)} faces"
        raise UserError(
            f"There {count} on this photo, so the number of the face can be 0 to {len(faces) - 1} (0 is the largest), "
            f"not {index}.",
            kind="no_such_face",
        )
    face = faces[index or 0]
    if face.width_px < MIN_FACE_PX:
        raise UserError(
            f"The face is only {face.width_px:.0f} pixels wide: give a photo on which it is {MIN_FACE_PX:.0f} pixels "
            "wide or more.",
            kind="face_too_small",
        )
    return face


def detect_face(photo: Photo, detector: LandmarkDetector, face: int | None = None) -> DetectedFace:
    """Detect the faces of ``photo`` and choose one (``face``: its number, 0 is the largest; None: the largest)."""
    faces = detector.detect(photo.image)
    chosen = choose_face(faces, face)
    return DetectedFace(**vars(chosen), faces_found=len(faces), index=face or 0)
