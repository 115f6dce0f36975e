# SPDX-License-Identifier: Apache-2.0
"""Test photos: a real face (NASA, public domain) and what people do to photo files.

`detector()` is one detector for the whole session: its networks are loaded once.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image, ImageCms
from rigfit.photo.align import apply_2d, invert_2d, warp
from rigfit.photo.landmarks import FaceLandmarks, MediapipeDetector

STORED_FOR_TAG = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How an upright picture has to be stored for the orientation tag to turn it upright again."""


@functools.cache
def detector() -> MediapipeDetector:
    return MediapipeDetector()


@functools.cache
def portrait() -> np.ndarray:
    """(512,512,3): a woman who smiles with an open mouth; her face is 93 pixels wide."""
    image = skimage.data.astronaut()
    image.setflags(write=False)
    return image


@functools.cache
def face() -> np.ndarray:
    """(220,200,3): the head alone."""
    return np.ascontiguousarray(portrait()[20:240, 124:324])


@functools.cache
def portrait_landmarks() -> FaceLandmarks:
    return detector().detect(portrait())[0]


def eye_distance(landmarks: FaceLandmarks) -> float:
    return float(np.linalg.norm(landmarks.points_px[33] - landmarks.points_px[263]))


def difference_percent(landmarks: FaceLandmarks, to_portrait: np.ndarray | None = None) -> float:
    """Mean distance to the landmarks found on `portrait()`, in % of the distance between the outer eye corners.

    to_portrait: (2,3) from the pixels of the picture on which `landmarks` were found to those of `portrait()`.
    """
    points = landmarks.points_px if to_portrait is None else apply_2d(to_portrait, landmarks.points_px)
    reference = portrait_landmarks()
    return float(np.linalg.norm(points - reference.points_px, axis=1).mean() / eye_distance(reference) * 100)


def resized(image: np.ndarray, width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def turned(roll_deg: float, side: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """`portrait()` turned clockwise around the face, and the matrix back."""
    angle = np.radians(roll_deg)
    linear = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    center = np.array([226.0, 125.0])
    matrix = np.concatenate([linear, (side / 2 - linear @ center)[:, None]], axis=1)
    return warp(portrait(), matrix, (side, side)), invert_2d(matrix)


def save(image: np.ndarray | Image.Image, path: Path, *, orientation: int | None = None, **options) -> Path:
    """Save a picture; with `orientation`, stored so that the tag turns it upright again."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
        if STORED_FOR_TAG[orientation] is not None:
            picture = picture.transpose(STORED_FOR_TAG[orientation])
    if path.suffix in (".heic", ".heif"):
        import pillow_heif

        pillow_heif.register_heif_opener()
    picture.save(path, **options)
    return path


def exif_with(**tags: float | int) -> bytes:
    """Exif bytes with tags of the Exif directory by their standard names."""
    numbers = {
        "FocalLength": 0x920A,
        "FocalLengthIn35mmFilm": 0xA405,
        "FocalPlaneXResolution": 0xA20E,
        "FocalPlaneResolutionUnit": 0xA210,
        "ExifImageWidth": 0xA002,
        "ExifImageHeight": 0xA003,
    }
    exif = Image.Exif()
    exif.get_ifd(0x8769).update({numbers[name]: value for name, value in tags.items()})
    return exif.tobytes()


def _profile(red: tuple[float, float], green: tuple[float, float], blue: tuple[float, float]) -> bytes:
    """An ICC v2 matrix profile with these primaries (xy), white D65 and a pure gamma of 2.2, written by hand."""

    def xyz(xy: tuple[float, float]) -> np.ndarray:
        return np.array([xy[0] / xy[1], 1.0, (1 - xy[0] - xy[1]) / xy[1]])

    white = xyz((0.3127, 0.3290))
    primaries = np.stack([xyz(red), xyz(green), xyz(blue)], axis=1)
    columns = primaries * np.linalg.solve(primaries, white)
    bradford = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
    d50 = np.array([0.9642, 1.0, 0.8249])
    adapt = np.linalg.inv(bradford) @ np.diag((bradford @ d50) / (bradford @ white)) @ bradford
    columns = adapt @ columns

    def s15(values: np.ndarray) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(v * 65536)) for v in values)

    name = b"rigfit test profile\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(name)) + name + bytes(78),
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": s15(d50),
        b"rXYZ": s15(columns[:, 0]),
        b"gXYZ": s15(columns[:, 1]),
        b"bXYZ": s15(columns[:, 2]),
        **{
            c + b"TRC": b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + bytes(2) for c in (b"r", b"g", b"b")
        },
    }
    table, body, start = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for key, data in tags.items():
        data += bytes(-len(data) % 4)
        table += key + struct.pack(">II", start + len(body), len(data))
        body += data
    header = struct.pack(">I4sI4s4s4s", 0, b"none", 0x02400000, b"mntr", b"RGB ", b"XYZ ") + bytes(12) + b"acsp"
    header += bytes(28) + s15(d50)[8:] + bytes(48)
    profile = header[:128].ljust(128, b"\0") + table + body
    return struct.pack(">I", len(profile)) + profile[4:]


def display_p3() -> bytes:
    return _profile((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))


def adobe_rgb() -> bytes:
    return _profile((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))


def in_profile(image: np.ndarray, profile: bytes) -> Image.Image:
    """The picture's numbers in another space, so that the embedded profile gives the same colours back."""
    converted = ImageCms.profileToProfile(
        Image.fromarray(image), ImageCms.createProfile("sRGB"), ImageCms.ImageCmsProfile(io.BytesIO(profile))
    )
    assert converted is not None
    return converted


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header declares this size: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def jpeg_that_claims(width: int, height: int, *, progressive: bool = False) -> bytes:
    """A small JPEG whose frame header was changed to declare this size."""
    buffer = io.BytesIO()
    Image.fromarray(face()).save(buffer, "JPEG", progressive=progressive)
    data = bytearray(buffer.getvalue())
    at = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff_of_floats(values: np.ndarray) -> bytes:
    """(H,W,3) float32 as an uncompressed little-endian TIFF (which Pillow does not write)."""
    height, width, channels = values.shape
    pixels = np.ascontiguousarray(values, "<f4").tobytes()
    count = 11
    extra = 8 + 2 + count * 12 + 4
    entries = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, channels, extra),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        (273, 4, 1, extra + 12),
        (277, 3, 1, channels),
        (278, 3, 1, height),
        (279, 4, 1, len(pixels)),
        (284, 3, 1, 1),
        (339, 3, channels, extra + 6),
    ]
    directory = struct.pack("<H", count) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<6H", 32, 32, 32, 3, 3, 3) + pixels
