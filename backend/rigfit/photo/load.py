# SPDX-License-Identifier: Apache-2.0
"""Read a photo of any usual format as upright 8-bit sRGB, with its focal length when the camera noted one."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError, features

from rigfit.errors import UserError

SUPPORTED_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".mpo",
    ".png",
    ".webp",
    ".avif",
    ".heic",
    ".heif",
    ".tif",
    ".tiff",
    ".bmp",
    ".gif",
)
"""For file dialogs only: what a file is gets decided by its content."""

BACKGROUND = 128
"""Transparent pixels are laid on this grey (sRGB, all channels)."""

MAX_PIXELS_JPEG = 400_000_000
"""Baseline JPEG is decoded at a half, quarter or eighth of its size, so that a 200 megapixel phone photo is fine."""

MAX_PIXELS = 128_000_000
"""Every other format is decoded whole: 128 megapixels are about half a gigabyte."""

MIN_SIDE_PX = 16

_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "AVIF", "HEIF", "TIFF", "BMP", "DIB", "GIF")
_KINDS = "JPEG, PNG, WebP, AVIF, HEIC, TIFF, BMP or GIF"
_FILM_DIAGONAL_MM = math.hypot(36.0, 24.0)
_FOCAL_35MM_LIMITS_MM = (7.0, 1200.0)
_CAMERA_ASPECTS = (1.0, 5 / 4, 4 / 3, 7 / 5, 3 / 2, 16 / 10, 16 / 9, 18 / 9, 18.5 / 9, 19 / 9, 19.5 / 9, 20 / 9)

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_open_lock = threading.Lock()
_openers_ready = False


@dataclass(frozen=True)
class Photo:
    """A photo as everything after it sees it.

    image: (H,W,3) uint8 sRGB, upright (orientation tag applied), long side at most ``max_side_px``.
    path: the file it came from.
    focal_px: focal length in pixels of ``image`` if the file tells a believable one, else None.
    original_size_px: (width, height) of the whole picture, upright, before it was made smaller.
    scale: long side of ``image`` / long side of the original; 1 if it was not made smaller.
    format: what the content is: ``JPEG``, ``PNG``, ``HEIF``, ...
    """

    image: np.ndarray
    path: Path
    focal_px: float | None
    original_size_px: tuple[int, int]
    scale: float
    format: str


def load_photo(path: str | os.PathLike[str], max_side_px: int = 4096) -> Photo:
    """Read the photo at ``path``; a long side above ``max_side_px`` is made smaller (antialiased).

    Raises UserError with kind ``photo_missing``, ``photo_folder``, ``photo_unreadable``, ``photo_empty``,
    ``photo_not_image``, ``photo_damaged``, ``photo_too_large`` or ``photo_too_small``.
    """
    path = Path(path)
    if max_side_px < MIN_SIDE_PX:
        raise ValueError(f"max_side_px must be {MIN_SIDE_PX} or more, not {max_side_px}")
    shown = _shown(path)
    with _opened(path) as file:
        try:
            with _declared_size_is_checked_here():
                opened = Image.open(file, formats=[f for f in _FORMATS if f in Image.OPEN])
        except UnidentifiedImageError:
            file.seek(0)
            other = _float_tiff(file, shown)
            if other is None:
                raise UserError(
                    f"“{shown}” is not a photo that can be read, or its start is damaged: "
                    f"save it again as {_KINDS} and try once more.",
                    kind="photo_not_image",
                ) from None
            return _photo(path, "TIFF", Image.fromarray(other[0]), other[1], None, max_side_px)
        except _DAMAGE as error:
            raise _damaged(shown, error) from None
        with opened:
            kind = (opened.format or "").replace("MPO", "JPEG").replace("DIB", "BMP")
            width, height = opened.size
            _check_size(shown, width, height, limit=_pixel_limit(opened, kind))
            exif = _exif(opened)
            orientation = _orientation(opened, exif, file)
            focal_px = _focal_px(exif, width, height)
            try:
                if kind == "JPEG" and max(width, height) > max_side_px:
                    shrink = max_side_px / max(width, height)
                    opened.draft(None, (math.ceil(width * shrink), math.ceil(height * shrink)))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Pillow warns about metadata that does not concern the pixels
                    opened.load()
                    if kind == "TIFF":  # Pillow turns TIFFs upright itself, the others not
                        width, height = opened.size
                    picture = _srgb(opened, max_side_px)
            except _DAMAGE as error:
                raise _damaged(shown, error) from None
    return _photo(path, kind, picture, orientation, focal_px, max_side_px, size=(width, height))


def _photo(
    path: Path,
    kind: str,
    picture: Image.Image,
    orientation: Any,
    focal_px: float | None,
    max_side_px: int,
    size: tuple[int, int] | None = None,
) -> Photo:
    """Shrink, turn upright, and scale the focal length (given for the stored size) along."""
    width, height = size or picture.size
    picture = _shrunk(picture, max_side_px)
    scale = max(picture.size) / max(width, height)
    if orientation in _TRANSPOSE:
        picture = picture.transpose(_TRANSPOSE[orientation])
        if orientation >= 5:
            width, height = height, width
    image = np.ascontiguousarray(np.array(picture, np.uint8))
    return Photo(image, path, None if focal_px is None else focal_px * scale, (width, height), scale, kind)


_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError, struct.error, zlib.error,
           RuntimeError, OverflowError, AttributeError)  # fmt: skip
"""What decoders raise on broken content (Pillow's plugins are not uniform)."""


def _damaged(shown: str, error: BaseException) -> UserError:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return UserError(f"There is not enough memory to read “{shown}”: make it smaller.", kind="photo_too_large")
    return UserError(
        f"“{shown}” is damaged or cut off, so that it cannot be read to its end: copy or export it again.",
        kind="photo_damaged",
    )


def _shown(path: Path) -> str:
    """The file's name for a message: surrogates and control characters replaced, long names shortened."""
    name = (path.name or str(path)).encode("utf-8", "replace").decode("utf-8")
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= 80 else f"{name[:50]}…{name[-25:]}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    shown = _shown(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"“{shown}” is a folder: give the photo inside it.", kind="photo_folder")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"“{shown}” is not an ordinary file: give a photo.", kind="photo_not_image")
        if status.st_size == 0:
            raise UserError(f"“{shown}” is empty (0 bytes): copy or export it again.", kind="photo_empty")
        file = open(path, "rb")  # noqa: SIM115 - closed below; errors of the open must not mix with the body's
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"There is no file “{shown}”: check the path.", kind="photo_missing") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is not valid"
        raise UserError(
            f"“{shown}” cannot be opened ({reason}): check the path and its permissions.", kind="photo_unreadable"
        ) from None
    with file:
        yield file


@contextlib.contextmanager
def _declared_size_is_checked_here() -> Iterator[None]:
    """Pillow's own limit is one number for all formats and only warns at first; ours follow the format."""
    global _openers_ready
    with _open_lock:
        if not _openers_ready:
            import pillow_heif

            pillow_heif.register_heif_opener()
            register_avif = getattr(pillow_heif, "register_avif_opener", None)  # gone in newer ones: Pillow reads AVIF
            if register_avif is not None and not features.check("avif"):
                register_avif()
            Image.init()
            _openers_ready = True
        saved, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            Image.MAX_IMAGE_PIXELS = saved


def _pixel_limit(opened: Image.Image, kind: str) -> int:
    progressive = bool(opened.info.get("progressive") or opened.info.get("progression"))
    return MAX_PIXELS_JPEG if kind == "JPEG" and not progressive else MAX_PIXELS


def _check_size(shown: str, width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise UserError(
            f"“{shown}” is {width} × {height} pixels, more than the {limit // 1_000_000} megapixels that can be read: "
            "make it smaller.",
            kind="photo_too_large",
        )
    if min(width, height) < MIN_SIDE_PX:
        raise UserError(
            f"“{shown}” is only {width} × {height} pixels: give a photo on which the face is 40 pixels wide or more.",
            kind="photo_too_small",
        )


# --- pixels ---------------------------------------------------------------------------------------------------------


def _shrunk(picture: Image.Image, max_side_px: int) -> Image.Image:
    width, height = picture.size
    if max(width, height) <= max_side_px:
        return picture
    shrink = max_side_px / max(width, height)
    size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
    return picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def _srgb(picture: Image.Image, max_side_px: int) -> Image.Image:
    """Any mode to RGB in the sRGB space, made smaller on the way (before the costly colour transform)."""
    profile = picture.info.get("icc_profile")
    mode = picture.mode
    if mode.startswith("I;16"):
        picture = Image.fromarray(_from_16_bit(np.asarray(picture)))
    elif mode == "I":
        picture = Image.fromarray(_from_integers(np.asarray(picture)))
    elif mode == "F":
        picture = Image.fromarray(_from_floats(np.asarray(picture)))
    elif mode == "1":
        picture = picture.convert("L")
    elif mode in ("P", "PA"):
        has_alpha = mode == "PA" or "transparency" in picture.info
        picture = picture.convert("RGBA" if has_alpha else "RGB")
    elif mode in ("L", "RGB") and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # one colour is declared transparent
    elif mode in ("La", "RGBa"):
        picture = picture.convert("LA" if mode == "La" else "RGBA")
    elif mode in ("YCbCr", "HSV", "RGBX"):
        picture = picture.convert("RGB")

    picture = _shrunk(picture, max_side_px)  # Pillow weighs colours by alpha here, so hidden colours do not leak
    alpha = picture.getchannel("A") if picture.mode in ("LA", "RGBA") else None
    if alpha is not None:
        picture = picture.convert(picture.mode[:-1])
    picture = _colour_managed(picture, profile)
    if alpha is not None:
        picture = Image.composite(picture, Image.new("RGB", picture.size, (BACKGROUND,) * 3), alpha)
    return picture


def _colour_managed(picture: Image.Image, profile: bytes | None) -> Image.Image:
    """L, RGB, CMYK or LAB to sRGB by the embedded profile; a profile that is broken or of another mode is ignored."""
    source: Any = None
    if picture.mode == "LAB":
        source = ImageCms.createProfile("LAB")
    elif profile:
        with contextlib.suppress(ImageCms.PyCMSError, OSError, TypeError, ValueError):
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if picture.mode == "RGB" and "srgb" in (source.profile.profile_description or "").lower():
                return picture
    if source is not None:
        with contextlib.suppress(ImageCms.PyCMSError, OSError, ValueError):
            converted = ImageCms.profileToProfile(
                picture,
                source,
                ImageCms.createProfile("sRGB"),
                renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
                outputMode="RGB",
                flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
            )
            if converted is not None:
                return converted
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _from_16_bit(values: np.ndarray) -> np.ndarray:
    """0…65535 → 0…255 (÷257, rounded)."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _from_integers(values: np.ndarray) -> np.ndarray:
    """32-bit integers do not say their range: 8 or 16 bits if all values fit, else the largest value is white."""
    top = int(values.max(initial=0))
    values = np.maximum(values, 0)
    if top <= 255:
        return values.astype(np.uint8)
    if top <= 65535:
        return _from_16_bit(values)
    return np.rint(values * (255.0 / top)).astype(np.uint8)


def _from_floats(values: np.ndarray) -> np.ndarray:
    """Floats do not say their range either.

    Up to about 1: display values. Brighter in places only: scene light (HDR), clipped at 1 and given the sRGB curve
    (IEC 61966-2-1). Brighter in at least half of the pixels: 8-bit or 16-bit numbers stored as floats.
    """
    values = np.nan_to_num(np.asarray(values, np.float32), nan=0.0, posinf=1e9, neginf=0.0)
    finite = values[values < 1e9]
    if finite.size == 0 or np.quantile(finite, 0.999) <= 1.05:
        shown = np.clip(values, 0.0, 1.0)
    elif np.median(finite) > 1.0:
        shown = np.clip(values / (255.0 if np.quantile(finite, 0.999) <= 256.0 else 65535.0), 0.0, 1.0)
    else:
        light = np.clip(values, 0.0, 1.0)
        shown = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.rint(shown * 255.0).astype(np.uint8)


def _float_tiff(file: IO[bytes], shown: str) -> tuple[np.ndarray, int] | None:
    """A TIFF with several float or 32-bit channels, which Pillow does not know: OpenCV reads it.

    OpenCV comes with mediapipe. Returns ((H,W,3) uint8 RGB, orientation tag), or None if it is not such a file.
    """
    from PIL import TiffImagePlugin

    head = file.read(8)
    if head[:4] not in (b"II*\0", b"MM\0*"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tags = TiffImagePlugin.ImageFileDirectory_v2(head)
            file.seek(tags.next)
            tags.load(file)
            width, height = int(tags[256]), int(tags[257])
            orientation = int(tags.get(274, 1))
    except _DAMAGE:
        return None
    _check_size(shown, width, height, MAX_PIXELS // 4)  # four bytes a channel
    try:
        import cv2
    except ImportError:
        return None
    file.seek(0)
    try:
        values = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None
    if values is None or values.ndim != 3 or values.shape[2] not in (3, 4):
        return None
    rgb = values[..., 2::-1]
    shown_values = _from_floats(rgb) if rgb.dtype.kind == "f" else _from_integers(rgb.astype(np.int64))
    if values.shape[2] == 4 and values.dtype.kind == "f":
        alpha = np.clip(np.nan_to_num(values[..., 3:]), 0.0, 1.0)
        shown_values = np.rint(shown_values * alpha + BACKGROUND * (1 - alpha)).astype(np.uint8)
    return np.ascontiguousarray(shown_values), orientation


# --- metadata -------------------------------------------------------------------------------------------------------


def _exif(opened: Image.Image) -> dict[int, Any]:
    """Tags of the main and the Exif directory; broken metadata counts as none."""
    tags: dict[int, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exif = opened.getexif()
            tags.update(exif)
            tags.update(exif.get_ifd(0x8769))
        except Exception:  # metadata comes from anywhere; the pixels are what counts
            pass
    return tags


def _orientation(opened: Image.Image, exif: dict[int, Any], file: IO[bytes]) -> Any:
    """The orientation (1…8) that is still to be applied once the pixels are decoded."""
    if opened.format == "TIFF":
        return 1
    if opened.format != "HEIF":
        return exif.get(0x0112, 1)
    # HEIC has its own boxes for this (irot, imir), which the decoder applies; the Exif tag then only repeats them. But
    # some writers note the tag alone.
    tag = opened.info.get("original_orientation") or 1
    position = file.tell()
    file.seek(0)
    head = file.read(1 << 20)
    file.seek(position)
    return 1 if b"irot" in head or b"imir" in head else tag


def _number(value: Any) -> float | None:
    try:
        number = float(value[0] if isinstance(value, tuple) else value)
    except (TypeError, ValueError, ZeroDivisionError, IndexError, OverflowError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _focal_px(tags: dict[int, Any], width: int, height: int) -> float | None:
    """Focal length in pixels of the stored picture (width × height), or None if unknown or not believable.

    The 35 mm equivalent is defined by the angle over the *diagonal* (CIPA DCG-001), 43.27 mm on film, and describes the
    picture as it was taken. If the file also notes that size and the picture is a crop of it, the diagonal of the
    picture as taken counts; if it was only made smaller, its own diagonal does. Editors often rewrite the noted size
    when they crop, so a picture of a shape that no camera takes counts as a crop of unknown size: a wrong focal length
    harms a fit more than an unknown one. (5:4 is taken by few cameras and is the usual crop for print: accepted for the
    35 mm equivalent only.)
    """
    taken_w, taken_h = _number(tags.get(0xA002)), _number(tags.get(0xA003))
    per_taken_px = 1.0  # pixels of the stored picture per pixel of the picture as taken
    diagonal = math.hypot(width, height)  # of the whole picture as taken, in stored pixels
    if taken_w and taken_h and taken_w >= MIN_SIDE_PX and taken_h >= MIN_SIDE_PX:
        if (width > height) != (taken_w > taken_h):  # turned by an editor that left the tags alone
            taken_w, taken_h = taken_h, taken_w
        if abs(math.log((width / height) / (taken_w / taken_h))) < 0.02:
            per_taken_px = diagonal / math.hypot(taken_w, taken_h)
        elif width <= taken_w and height <= taken_h:
            diagonal = math.hypot(taken_w, taken_h)
        else:
            return None  # cropped and made larger: nothing can be concluded
    else:
        taken_w, taken_h = float(width), float(height)
    aspect = max(taken_w, taken_h) / min(taken_w, taken_h)
    if min(abs(aspect / known - 1) for known in _CAMERA_ASPECTS) > 0.015:
        return None
    equivalent_mm = _number(tags.get(0xA405))
    low, high = _FOCAL_35MM_LIMITS_MM
    if equivalent_mm and low <= equivalent_mm <= high:
        return equivalent_mm / _FILM_DIAGONAL_MM * diagonal
    focal_mm, resolution = _number(tags.get(0x920A)), _number(tags.get(0xA20E))
    unit_mm = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}.get(tags.get(0xA210, 2))
    if focal_mm and resolution and unit_mm and abs(aspect - 1.25) > 0.02:
        zoom = _number(tags.get(0xA404)) or 1.0
        focal_px = focal_mm * resolution / unit_mm * per_taken_px * zoom
        if low <= focal_px / diagonal * _FILM_DIAGONAL_MM <= high:
            return focal_px
    return None
