# SPDX-License-Identifier: Apache-2.0
"""Photos as people have them: every format, orientation, mode and kind of damage."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import photos
import pytest
from PIL import Image, ImageCms
from rigfit.errors import UserError
from rigfit.photo.load import BACKGROUND, SUPPORTED_SUFFIXES, load_photo


def difference(image: np.ndarray, expected: np.ndarray) -> float:
    """Mean difference in 8-bit levels."""
    assert image.shape == expected.shape
    return float(np.abs(image.astype(int) - expected.astype(int)).mean())


def refused(path, kind: str) -> str:
    with pytest.raises(UserError) as caught:
        load_photo(path)
    assert caught.value.kind == kind, caught.value.message
    message = caught.value.message
    assert "\n" not in message
    assert message.endswith(".")
    assert "Traceback" not in message
    return message


# --- orientation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".avif", ".heic", ".tif"])
def test_all_orientations_give_the_same_picture(tmp_path, suffix):
    options = {} if suffix in (".png", ".tif") else {"quality": 95}
    for tag in range(1, 9):
        path = photos.save(photos.face(), tmp_path / f"{tag}{suffix}", orientation=tag, **options)
        photo = load_photo(path)
        assert difference(photo.image, photos.face()) < 4, f"tag {tag}"
        assert photo.original_size_px == (200, 220)


def test_heic_with_an_orientation_tag_but_without_its_own_boxes(tmp_path):
    import pillow_heif

    pillow_heif.register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "tag.heic"
    Image.fromarray(photos.face()).transpose(Image.Transpose.ROTATE_90).save(path, exif=exif, quality=95)
    assert difference(load_photo(path).image, photos.face()) < 4


def test_nonsense_orientation_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 77
    path = photos.save(photos.face(), tmp_path / "a.png", exif=exif.tobytes())
    assert difference(load_photo(path).image, photos.face()) == 0


# --- modes ----------------------------------------------------------------------------------------------------------


def test_grey_modes(tmp_path):
    grey = Image.fromarray(photos.face()).convert("L")
    expected = np.asarray(grey.convert("RGB"))
    assert difference(load_photo(photos.save(grey, tmp_path / "l.png")).image, expected) == 0
    opaque = grey.copy().convert("LA")
    assert difference(load_photo(photos.save(opaque, tmp_path / "la.png")).image, expected) == 0
    bits = grey.convert("1")
    one = load_photo(photos.save(bits, tmp_path / "one.png")).image
    assert difference(one, np.asarray(bits.convert("RGB"))) == 0
    assert set(np.unique(one)) == {0, 255}


def test_16_bit_is_scaled_by_257(tmp_path):
    grey = np.asarray(Image.fromarray(photos.face()).convert("L"))
    deep = grey.astype(np.uint16) * 257
    for name in ("deep.png", "deep.tif"):
        image = load_photo(photos.save(Image.fromarray(deep), tmp_path / name)).image
        assert difference(image, np.repeat(grey[..., None], 3, axis=2)) == 0, name
    half = Image.fromarray(np.full((32, 32), 32768, np.uint16))
    assert load_photo(photos.save(half, tmp_path / "half.png")).image[0, 0].tolist() == [128, 128, 128]


def test_16_bit_big_endian_tiff(tmp_path):
    deep = (np.arange(64 * 64, dtype=np.uint32) * 16).astype(np.uint16).reshape(64, 64)
    picture = Image.frombytes("I;16B", (64, 64), deep.astype(">u2").tobytes())
    image = load_photo(photos.save(picture, tmp_path / "big.tif")).image
    assert np.abs(image[..., 0].astype(int) - np.rint(deep / 257).astype(int)).max() == 0


def test_32_bit_integers(tmp_path):
    grey = np.asarray(Image.fromarray(photos.face()).convert("L"))
    for name, factor in (("eight", 1), ("sixteen", 257)):
        picture = Image.fromarray(grey.astype(np.int32) * factor)
        image = load_photo(photos.save(picture, tmp_path / f"{name}.tif")).image
        assert difference(image[..., 0], grey) == 0, name


def test_float_tiff(tmp_path):
    grey = np.asarray(Image.fromarray(photos.face()).convert("L"))
    unit = (grey / 255).astype(np.float32)
    assert difference(load_photo(photos.save(Image.fromarray(unit), tmp_path / "u.tif")).image[..., 0], grey) == 0
    byte = Image.fromarray(grey.astype(np.float32))
    assert difference(load_photo(photos.save(byte, tmp_path / "b.tif")).image[..., 0], grey) == 0
    broken = unit.copy()
    broken[:5] = np.nan
    broken[5:9] = np.inf
    image = load_photo(photos.save(Image.fromarray(broken), tmp_path / "n.tif")).image[..., 0]
    assert image[:5].max() == 0
    assert image[5:9].min() == 255
    assert difference(image[9:], grey[9:]) == 0


def test_hdr_float_tiff_is_clipped_and_given_the_srgb_curve(tmp_path):
    light = np.full((64, 64), 0.2140411, np.float32)  # linear light of sRGB 0.5
    light[:8] = 40.0  # a lamp
    image = load_photo(photos.save(Image.fromarray(light), tmp_path / "hdr.tif")).image
    assert image[0, 0].tolist() == [255, 255, 255]
    assert abs(int(image[40, 40, 0]) - 128) <= 1


def test_float_tiff_with_three_channels(tmp_path):
    path = tmp_path / "rgb.tif"
    path.write_bytes(photos.tiff_of_floats(photos.face().astype(np.float32) / 255))
    photo = load_photo(path)
    assert difference(photo.image, photos.face()) == 0
    assert photo.format == "TIFF"


def test_palette_with_and_without_transparency(tmp_path):
    palette = Image.fromarray(photos.face()).quantize(64)
    expected = np.asarray(palette.convert("RGB"))
    for suffix in (".png", ".gif", ".bmp", ".tif"):
        assert difference(load_photo(photos.save(palette, tmp_path / f"p{suffix}")).image, expected) == 0, suffix
    clear = palette.copy()
    index = int(np.asarray(palette)[0, 0])
    image = load_photo(photos.save(clear, tmp_path / "t.png", transparency=index)).image
    mask = np.asarray(palette) == index
    assert (image[mask] == BACKGROUND).all()
    assert difference(image[~mask], expected[~mask]) == 0


def test_one_transparent_colour_of_an_rgb_png(tmp_path):
    image = photos.face().copy()
    image[:20, :20] = (1, 2, 3)
    loaded = load_photo(photos.save(image, tmp_path / "t.png", transparency=(1, 2, 3))).image
    assert (loaded[:20, :20] == BACKGROUND).all()
    assert (loaded[100, 100] == image[100, 100]).all()


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tif", ".avif"])
def test_hidden_colours_do_not_show(tmp_path, suffix):
    alpha = np.full(photos.face().shape[:2], 255, np.uint8)
    alpha[:60] = 0
    pictures = []
    for hidden in ((255, 0, 0), (0, 255, 0)):
        image = np.dstack([photos.face(), alpha])
        image[:60, :, :3] = hidden
        options = {".webp": {"lossless": True, "exact": True}, ".avif": {"quality": 100}}.get(suffix, {})
        pictures.append(load_photo(photos.save(image, tmp_path / f"{hidden[0]}{suffix}", **options)).image)
    limit = 6 if suffix == ".avif" else 0
    for picture in pictures:
        assert np.abs(picture[:52].astype(int) - BACKGROUND).max() <= limit
        assert difference(picture[68:], photos.face()[68:]) <= limit


def test_half_transparent_pixels_are_mixed_with_the_grey(tmp_path):
    image = np.zeros((32, 32, 4), np.uint8)
    image[..., 0] = 255
    image[..., 3] = 128
    loaded = load_photo(photos.save(image, tmp_path / "half.png")).image[5, 5]
    assert np.abs(loaded.astype(int) - [192, 64, 64]).max() <= 1


def test_transparency_does_not_bleed_when_made_smaller(tmp_path):
    image = np.zeros((600, 600, 4), np.uint8)
    image[..., :3] = (255, 0, 255)
    image[150:450, 150:450] = (90, 120, 60, 255)
    loaded = load_photo(photos.save(image, tmp_path / "a.png"), max_side_px=150).image.astype(int)
    on_edge = loaded[37:39, 60:90]  # between the square and the grey: neither may turn magenta
    assert (on_edge[..., 1] >= on_edge[..., 2] - 12).all()
    assert loaded[75, 75].tolist() == [90, 120, 60]


def test_cmyk(tmp_path):
    cmyk = Image.fromarray(photos.face()).convert("CMYK")
    expected = np.asarray(cmyk.convert("RGB"))
    assert difference(load_photo(photos.save(cmyk, tmp_path / "c.jpg", quality=95)).image, expected) < 4
    assert difference(load_photo(photos.save(cmyk, tmp_path / "c.tif")).image, expected) == 0


def test_cmyk_with_a_profile_of_another_mode_is_still_read(tmp_path):
    cmyk = Image.fromarray(photos.face()).convert("CMYK")
    path = photos.save(cmyk, tmp_path / "c.jpg", quality=95, icc_profile=photos.display_p3())
    assert difference(load_photo(path).image, np.asarray(cmyk.convert("RGB"))) < 4


def test_lab_tiff(tmp_path):
    lab = ImageCms.profileToProfile(
        Image.fromarray(photos.face()), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert difference(load_photo(photos.save(lab, tmp_path / "lab.tif")).image, photos.face()) < 4


@pytest.mark.parametrize("profile", ["display_p3", "adobe_rgb"])
def test_wide_profiles_are_converted(tmp_path, profile):
    icc = getattr(photos, profile)()
    wide = photos.in_profile(photos.face(), icc)
    assert difference(np.asarray(wide), photos.face()) > 2.5, "the profile must make a difference for this test"
    for name, options in (("a.png", {}), ("a.jpg", {"quality": 98, "subsampling": 0})):
        image = load_photo(photos.save(wide, tmp_path / name, icc_profile=icc, **options)).image
        assert difference(image, photos.face()) < 1.5, name


def test_broken_profile_is_ignored(tmp_path):
    path = photos.save(photos.face(), tmp_path / "a.png", icc_profile=b"no profile at all" * 20)
    assert difference(load_photo(path).image, photos.face()) == 0


def test_channel_order_is_rgb(tmp_path):
    image = np.zeros((32, 32, 3), np.uint8)
    image[..., 0], image[..., 2] = 200, 30
    for suffix in (".png", ".tif", ".bmp", ".webp", ".heic", ".avif", ".jpg"):
        loaded = load_photo(photos.save(image, tmp_path / f"a{suffix}")).image[16, 16].astype(int)
        assert loaded[0] > 190, suffix
        assert loaded[2] < 45, suffix
    path = tmp_path / "floats.tif"
    path.write_bytes(photos.tiff_of_floats(image.astype(np.float32) / 255))
    assert load_photo(path).image[16, 16].tolist() == [200, 0, 30]


# --- format, size ---------------------------------------------------------------------------------------------------


def test_content_decides_not_the_name(tmp_path):
    jpeg = photos.save(photos.face(), tmp_path / "a.jpg", quality=95)
    for name in ("b.png", "c.heic", "d", "e.txt", "f.JPEG"):
        other = tmp_path / name
        other.write_bytes(jpeg.read_bytes())
        photo = load_photo(other)
        assert photo.format == "JPEG"
        assert difference(photo.image, photos.face()) < 4


def test_every_suffix_of_the_file_dialog_is_read(tmp_path):
    writers = {".jpe": "JPEG", ".jfif": "JPEG", ".mpo": "JPEG", ".heif": "HEIF"}
    for suffix in SUPPORTED_SUFFIXES:
        options = {"format": writers[suffix]} if suffix in writers else {}
        photo = load_photo(photos.save(photos.face(), tmp_path / f"a{suffix}", **options))
        assert photo.image.shape == photos.face().shape, suffix


def test_animated_and_many_paged_files_give_their_first_picture(tmp_path):
    first, second = Image.fromarray(photos.face()), Image.fromarray(255 - photos.face())
    for suffix in (".webp", ".tif", ".png"):
        options = {"lossless": True} if suffix == ".webp" else {}
        path = photos.save(first, tmp_path / f"a{suffix}", save_all=True, append_images=[second], **options)
        assert difference(load_photo(path).image, photos.face()) < 1, suffix


def test_large_pictures_are_made_smaller(tmp_path):
    path = photos.save(photos.resized(photos.face(), 2000, 2200), tmp_path / "a.jpg", orientation=6, quality=95)
    photo = load_photo(path, max_side_px=550)
    assert photo.image.shape == (550, 500, 3)
    assert photo.original_size_px == (2000, 2200)
    assert photo.scale == pytest.approx(0.25)
    assert difference(photo.image, photos.resized(photos.face(), 500, 550)) < 4


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak memory from Linux")
def test_200_megapixel_jpeg_in_bounded_memory(tmp_path):
    path = tmp_path / "huge.jpg"
    Image.new("L", (16320, 12240), 140).save(path, quality=30)
    # The peak of the process's own memory: getrusage would report the parent's peak, which a fork inherits.
    script = textwrap.dedent(f"""
        from rigfit.photo.load import load_photo
        photo = load_photo({str(path)!r})
        peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(photo.image.shape, photo.original_size_px, peak)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(3072, 4096, 3) (16320, 12240) ")
    kilobytes = int(done.stdout.split()[-1])
    assert kilobytes < 290_000, "decoded at full size this one channel alone would be 200 MB more than the rest"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bomb.png", photos.png_that_claims(100_000, 100_000)),
        ("bomb.jpg", photos.jpeg_that_claims(65_000, 65_000)),
        ("progressive.jpg", photos.jpeg_that_claims(20_000, 18_000, progressive=True)),
    ],
)
def test_bombs_are_refused_by_their_declared_size(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name, "photo_too_large")
    assert re.search(r"\d+ × \d+ pixels", message)


def test_a_few_pixels_are_refused(tmp_path):
    assert "4 × 3" in refused(photos.save(np.zeros((3, 4, 3), np.uint8), tmp_path / "a.png"), "photo_too_small")


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".avif", ".heic", ".tif", ".gif", ".bmp"])
def test_cut_off_files(tmp_path, suffix):
    rng = np.random.default_rng(0)
    noisy = rng.integers(0, 255, (120, 160, 3), dtype=np.uint8)
    whole = photos.save(noisy, tmp_path / f"whole{suffix}").read_bytes()
    for share in (0.02, 0.3, 0.7, 0.95):
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UserError) as caught:
            load_photo(path)
        assert caught.value.kind in ("photo_damaged", "photo_not_image"), f"{suffix} {share}"
        assert "cut" in caught.value.message


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".heic", ".avif", ".gif"])
def test_flipped_bytes_never_crash(tmp_path, suffix):
    whole = photos.save(photos.face(), tmp_path / f"whole{suffix}").read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(12):
        data = bytearray(whole)
        for at in rng.integers(0, min(len(data), 600), 4):
            data[at] = rng.integers(256)
        path = tmp_path / f"bad{suffix}"
        path.write_bytes(data)
        try:
            image = load_photo(path).image
            assert image.dtype == np.uint8
            assert image.ndim == 3
        except UserError as error:
            assert error.kind.startswith("photo_")  # noqa: PT017 - either outcome is right


def test_what_is_not_a_photo(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    assert "empty" in refused(tmp_path / "empty.jpg", "photo_empty")
    (tmp_path / "text.jpg").write_text("not a photo\n" * 50)
    refused(tmp_path / "text.jpg", "photo_not_image")
    (tmp_path / "doc.pdf").write_bytes(b"%PDF-1.7\n" + bytes(200))
    refused(tmp_path / "doc.pdf", "photo_not_image")
    assert "folder" in refused(tmp_path, "photo_folder")
    assert "gone.jpg" in refused(tmp_path / "gone.jpg", "photo_missing")
    refused(tmp_path / "text.jpg" / "below.jpg", "photo_missing")
    refused("a\0b.jpg", "photo_unreadable")
    refused(tmp_path / ("x" * 400 + ".jpg"), "photo_unreadable")
    refused("/dev/null", "photo_not_image")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = photos.save(photos.face(), tmp_path / "a.png")
    path.chmod(0)
    assert "permission" in refused(path, "photo_unreadable").lower()


def test_any_path_works(tmp_path):
    deep = tmp_path
    while len(str(deep)) < 900:
        deep = deep / ("Ordner mit Leerzeichen " + "ä" * 20)
    deep.mkdir(parents=True)
    for name in ("фото 写真.png", "😀 #1 100%.png", "a'b\"c.png", "-rf.png", " .png"):
        path = photos.save(photos.face(), deep / name)
        photo = load_photo(path)
        assert photo.path == path
        assert difference(photo.image, photos.face()) == 0
        assert difference(load_photo(str(path)).image, photos.face()) == 0


# --- focal length ---------------------------------------------------------------------------------------------------


def focal(tmp_path, size=(600, 400), max_side_px=4096, orientation=None, **tags):
    exif = Image.Exif()
    exif.load(photos.exif_with(**tags))
    if orientation:
        exif[0x0112] = orientation
    path = tmp_path / "focal.jpg"
    Image.new("RGB", size, (90, 80, 70)).save(path, exif=exif.tobytes())
    return load_photo(path, max_side_px).focal_px


def test_focal_length_from_the_35_mm_equivalent(tmp_path):
    diagonal = np.hypot(600, 400)
    expected = 50 / np.hypot(36, 24) * diagonal
    assert focal(tmp_path, FocalLengthIn35mmFilm=50) == pytest.approx(expected)
    assert focal(tmp_path, max_side_px=300, FocalLengthIn35mmFilm=50) == pytest.approx(expected / 2, rel=1e-3)
    assert focal(tmp_path, orientation=6, FocalLengthIn35mmFilm=50) == pytest.approx(expected)
    # The diagonal counts, not the width: on 4:3 the two differ.
    four_thirds = focal(tmp_path, size=(640, 480), FocalLengthIn35mmFilm=26)
    assert four_thirds == pytest.approx(26 / np.hypot(36, 24) * 800)


def test_focal_length_of_a_crop_and_of_a_smaller_copy(tmp_path):
    taken = np.hypot(6000, 4000)
    crop = focal(tmp_path, size=(500, 900), FocalLengthIn35mmFilm=50, ExifImageWidth=6000, ExifImageHeight=4000)
    assert crop == pytest.approx(50 / np.hypot(36, 24) * taken)
    smaller = focal(tmp_path, FocalLengthIn35mmFilm=50, ExifImageWidth=6000, ExifImageHeight=4000)
    assert smaller == pytest.approx(50 / np.hypot(36, 24) * np.hypot(600, 400))


def test_a_crop_of_unknown_size_has_no_focal_length(tmp_path):
    assert focal(tmp_path, size=(300, 680), FocalLengthIn35mmFilm=24) is None


def test_focal_length_from_the_focal_plane(tmp_path):
    tags = {"FocalLength": 85.0, "FocalPlaneXResolution": 600 / 36 * 10, "FocalPlaneResolutionUnit": 3}
    assert focal(tmp_path, **tags) == pytest.approx(85 / 36 * 600, rel=1e-3)
    inches = {"FocalLength": 85.0, "FocalPlaneXResolution": 600 / 36 * 25.4, "FocalPlaneResolutionUnit": 2}
    assert focal(tmp_path, **inches) == pytest.approx(85 / 36 * 600, rel=1e-3)


def test_unbelievable_focal_lengths_are_unknown(tmp_path):
    assert focal(tmp_path) is None
    assert focal(tmp_path, FocalLengthIn35mmFilm=0) is None
    assert focal(tmp_path, FocalLengthIn35mmFilm=60000) is None
    assert focal(tmp_path, FocalLength=85.0) is None
    assert focal(tmp_path, FocalLength=85.0, FocalPlaneXResolution=1e-6, FocalPlaneResolutionUnit=3) is None


def test_blenders_file_dialog_offers_what_is_read():
    """The add-on's list stands in its own code; read here without importing bpy."""
    source = Path(__file__).resolve().parents[2] / "blender_addon" / "operators" / "photos.py"
    offered = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SUFFIXES"
    )
    assert set(offered) == set(SUPPORTED_SUFFIXES)
