# SPDX-License-Identifier: Apache-2.0
"""Detection on a real face under everything that people do to photos. Figures are % of the outer-eye distance."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import photos
import pytest
from PIL import Image, ImageDraw
from rigfit.errors import UserError
from rigfit.photo import mesh478
from rigfit.photo.align import apply_2d, invert_2d
from rigfit.photo.detector import self_occluded
from rigfit.photo.landmarks import (
    FaceLandmarks,
    MediapipeDetector,
    choose_face,
    detect_face,
    load_landmark_file,
    save_landmark_file,
)
from rigfit.photo.load import load_photo


def only(image: np.ndarray) -> FaceLandmarks:
    faces = photos.detector().detect(image)
    assert len(faces) == 1
    return faces[0]


def plain_photo(tmp_path, image: np.ndarray):
    return load_photo(photos.save(image, tmp_path / "photo.png"))


# --- what is found --------------------------------------------------------------------------------------------------


def test_landmarks_lie_where_the_face_is():
    face = photos.portrait_landmarks()
    assert face.points_px.shape == (478, 2)
    assert face.points_px.dtype == np.float64
    assert face.depth.shape == face.visible.shape == face.spread_px.shape == (478,)
    # Read off the enlarged picture: pupils and corners of the mouth.
    for index, where in {468: (203.5, 101), 473: (246.8, 103.3), 61: (202.8, 139.5), 291: (245, 141)}.items():
        assert np.linalg.norm(face.points_px[index] - where) < 1.5, index
    assert face.score > 0.99
    assert face.rotation_deg == 0
    assert face.visible.mean() > 0.97
    assert face.depth[mesh478.NOSE_TIP] < face.depth[33], "the nose is nearer than the eyes"
    x0, y0, x1, y1 = face.box_px
    assert (x0, y0) == pytest.approx(face.points_px.min(axis=0))
    assert (x1, y1) == pytest.approx(face.points_px.max(axis=0))


def test_the_open_smile_is_seen():
    points = photos.portrait_landmarks().points_px
    width = np.linalg.norm(points[61] - points[291])
    assert np.linalg.norm(points[13] - points[14]) > 0.1 * width, "teeth show between the lips"
    assert (points[61, 1] + points[291, 1]) / 2 < points[14, 1], "the corners are up"


def test_right_and_left_are_the_persons():
    points = photos.portrait_landmarks().points_px
    assert points[33, 0] < points[263, 0], "the right eye is at the left of the picture"


def test_order_of_colour_channels_is_rgb():
    """The networks see the channels in the right order: swapped ones are less sure of the face."""
    right = photos.portrait_landmarks()
    swapped = only(np.ascontiguousarray(photos.portrait()[..., ::-1]))
    assert swapped.score < right.score
    assert photos.difference_percent(swapped) > 0.2


def test_quick_modes_agree():
    for passes in (1, 2):
        face = MediapipeDetector(passes=passes).detect(photos.portrait())[0]
        assert photos.difference_percent(face) < 1.0, passes
    with pytest.raises(ValueError, match="passes"):
        MediapipeDetector(passes=3)


def test_detection_is_deterministic():
    again = only(photos.portrait())
    assert np.array_equal(again.points_px, photos.portrait_landmarks().points_px)
    fresh = MediapipeDetector().detect(photos.portrait())[0]
    assert np.array_equal(fresh.points_px, photos.portrait_landmarks().points_px)


# --- repeatability --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".avif", ".heic"])
def test_orientation_tags_do_not_move_landmarks(tmp_path, suffix):
    tags = range(1, 9) if suffix == ".jpg" else (3, 6)
    for tag in tags:
        path = photos.save(photos.portrait(), tmp_path / f"{tag}{suffix}", orientation=tag, quality=95)
        face = detect_face(load_photo(path), photos.detector())
        assert photos.difference_percent(face) < 0.6, f"{suffix} {tag}"
        assert face.rotation_deg == 0


def test_rotated_without_a_tag_is_found_in_the_given_pixels():
    side = 512
    back = {
        1: [[0, -1, side], [1, 0, 0]],
        2: [[-1, 0, side], [0, -1, side]],
        3: [[0, 1, 0], [-1, 0, side]],
    }
    for quarters, rotation in ((1, 270), (2, 180), (3, 90)):
        face = only(np.ascontiguousarray(np.rot90(photos.portrait(), quarters)))
        assert face.rotation_deg == rotation
        assert photos.difference_percent(face, np.array(back[quarters], np.float64)) < 0.3


@pytest.mark.parametrize("roll", [-30, -15, 15, 30, 75, 160])
def test_roll(roll):
    image, back = photos.turned(roll)
    face = only(image)
    assert photos.difference_percent(face, back) < 0.4
    assert face.rotation_deg == round(roll / 90) * 90 % 360


def test_crops_moved_by_ten_percent():
    side = 220
    for dx in (-22, 0, 22):
        for dy in (-22, 0, 22):
            x, y = 115 + dx, 20 + dy
            face = only(np.ascontiguousarray(photos.portrait()[y if y > 0 else 0 : y + side, x : x + side]))
            to_portrait = np.array([[1.0, 0, x], [0, 1, max(y, 0)]])
            assert photos.difference_percent(face, to_portrait) < 0.25, (dx, dy)


@pytest.mark.parametrize("scale", [0.5, 2, 4, 8])
def test_any_scale(scale):
    side = round(512 * scale)
    face = only(photos.resized(photos.portrait(), side, side))
    assert photos.difference_percent(face, np.array([[1 / scale, 0, 0], [0, 1 / scale, 0]])) < 0.7


def test_a_quarter_of_the_size_is_still_located():
    face = only(photos.resized(photos.portrait(), 128, 128))
    assert photos.difference_percent(face, np.array([[4.0, 0, 0], [0, 4, 0]])) < 3.5
    assert face.width_px < 25


def test_frame_filling():
    x0, y0, x1, y1 = 179, 68, 272, 178
    tight = np.ascontiguousarray(photos.portrait()[y0:y1, x0:x1])
    assert photos.difference_percent(only(tight), np.array([[1.0, 0, x0], [0, 1, y0]])) < 1.5
    huge = photos.resized(tight, 1860, 2200)
    assert photos.difference_percent(only(huge), np.array([[0.05, 0, x0], [0, 0.05, y0]])) < 1.5


def test_points_outside_the_picture_are_not_visible():
    cut = np.ascontiguousarray(photos.portrait()[85:170, 190:262])
    face = only(cut)
    inside = ((face.points_px >= 0) & (face.points_px <= [72, 85])).all(axis=1)
    assert not inside.all()
    assert not face.visible[~inside].any()


def test_a_small_face_in_a_large_picture():
    picture = np.full((2400, 4000, 3), 90, np.uint8)
    picture[1500:1756, 500:756] = photos.resized(photos.portrait(), 256, 256)
    face = only(picture)
    assert photos.difference_percent(face, np.array([[2.0, 0, -1000], [0, 2, -3000]])) < 1.0


def test_mirror_image_gives_the_mirrored_landmarks():
    face = only(np.ascontiguousarray(photos.portrait()[:, ::-1]))
    back = face.points_px[mesh478.MIRROR] * [-1.0, 1.0] + [512.0, 0.0]
    reference = photos.portrait_landmarks()
    error = np.linalg.norm(back - reference.points_px, axis=1).mean() / photos.eye_distance(reference) * 100
    assert error < 0.5
    assert abs((back - reference.points_px)[:, 0].mean()) < 0.1, "no bias to one side, not even half a pixel"


# --- hard faces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "colour"),
    [
        ((174, 99, 277, 118), (10, 10, 10)),  # dark glasses
        ((174, 134, 277, 188), (90, 140, 200)),  # a mask
        ((170, 50, 280, 95), (60, 30, 10)),  # a fringe
        ((170, 60, 210, 188), (190, 140, 110)),  # a hand over one side
    ],
    ids=["glasses", "mask", "fringe", "hand"],
)
def test_half_covered_faces_are_found_and_the_guessed_points_spread(box, colour):
    picture = Image.fromarray(photos.portrait())
    ImageDraw.Draw(picture).rectangle(box, fill=colour)
    face = only(np.asarray(picture))
    assert photos.difference_percent(face) < 8
    x0, y0, x1, y1 = box
    points = photos.portrait_landmarks().points_px
    covered = (points[:, 0] > x0) & (points[:, 0] < x1) & (points[:, 1] > y0) & (points[:, 1] < y1)
    assert np.median(face.spread_px[covered]) > np.median(face.spread_px[~covered])


def test_dark_and_grey_photos():
    dark = (photos.portrait() * 0.1).astype(np.uint8)
    assert photos.difference_percent(only(dark)) < 3
    grey = np.repeat(np.asarray(Image.fromarray(photos.portrait()).convert("L"))[..., None], 3, axis=2)
    assert photos.difference_percent(only(grey)) < 1


# --- several faces --------------------------------------------------------------------------------------------------


def two_faces() -> np.ndarray:
    """A small face at the left, a large one at the right."""
    picture = np.full((600, 1000, 3), 120, np.uint8)
    picture[100:356, 20:276] = photos.resized(photos.portrait(), 256, 256)
    picture[40:552, 400:912] = photos.portrait()
    return picture


def test_two_faces_are_ordered_by_size_and_can_be_chosen(tmp_path):
    photo = plain_photo(tmp_path, two_faces())
    large = detect_face(photo, photos.detector())
    assert (large.faces_found, large.index) == (2, 0)
    assert photos.difference_percent(large, np.array([[1.0, 0, -400], [0, 1, -40]])) < 0.4
    small = detect_face(photo, photos.detector(), face=1)
    assert (small.faces_found, small.index) == (2, 1)
    assert photos.difference_percent(small, np.array([[2.0, 0, -40], [0, 2, -200]])) < 1
    assert large.box_area_px > small.box_area_px
    with pytest.raises(UserError, match="2 faces") as caught:
        detect_face(photo, photos.detector(), face=2)
    assert caught.value.kind == "no_such_face"
    with pytest.raises(UserError):
        detect_face(photo, photos.detector(), face=-1)


def test_faces_in_different_rotations_are_not_mixed_up():
    """Beside a clear upright face, no second face is made up of its own parts."""
    assert len(photos.detector().detect(two_faces())) == 2


def test_a_tiny_face_is_refused_with_its_size(tmp_path):
    photo = plain_photo(tmp_path, photos.resized(photos.portrait(), 150, 150))
    with pytest.raises(UserError, match=r"only 2\d pixels wide") as caught:
        detect_face(photo, photos.detector())
    assert caught.value.kind == "face_too_small"


# --- no face --------------------------------------------------------------------------------------------------------


def drawing() -> np.ndarray:
    picture = Image.new("RGB", (400, 400), "white")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((80, 40, 320, 360), outline="black", width=4)
    draw.ellipse((140, 140, 170, 170), outline="black", width=3)
    draw.ellipse((230, 140, 260, 170), outline="black", width=3)
    draw.arc((150, 200, 250, 300), 20, 160, fill="black", width=4)
    draw.line((200, 180, 190, 230), fill="black", width=4)
    return np.asarray(picture)


def nothing() -> dict[str, np.ndarray]:
    import skimage.data

    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 255, 300).astype(np.uint8)
    return {
        "noise": rng.integers(0, 256, (300, 400, 3), dtype=np.uint8),
        "blotches": photos.resized(rng.integers(0, 256, (12, 15, 3), dtype=np.uint8), 400, 320),
        "gradient": np.ascontiguousarray(np.broadcast_to(ramp[:, None, None], (300, 300, 3))),
        "black": np.zeros((200, 200, 3), np.uint8),
        "drawing": drawing(),
        "cat": np.ascontiguousarray(skimage.data.chelsea()),
    }


@pytest.mark.parametrize("kind", ["noise", "blotches", "gradient", "black", "drawing", "cat"])
def test_no_face(tmp_path, kind):
    photo = plain_photo(tmp_path, nothing()[kind])
    with pytest.raises(UserError, match="No face was found") as caught:
        detect_face(photo, photos.detector())
    assert caught.value.kind == "no_face"
    assert "file" in caught.value.message, "says that landmarks can be given in a file"


def test_landmarks_that_differ_between_crops_are_no_face():
    from rigfit.photo import detector
    from rigfit.photo.align import standard_face

    def looks_like_a_face(log_odds: float, wobble: float) -> bool:
        spread = np.full(478, wobble * 100)
        mesh = detector._Mesh(standard_face() * 100, log_odds, 0.0, np.eye(2, 3), spread)
        assert mesh.wobble == pytest.approx(wobble)
        return detector._is_face(mesh)

    assert looks_like_a_face(13, 0.02)
    assert not looks_like_a_face(13, 0.05)
    assert looks_like_a_face(20, 0.05)
    assert not looks_like_a_face(20, 0.08)
    assert not looks_like_a_face(9, 0.02), "frontal and yet unsure"


def test_pictures_of_extreme_shape():
    for shape in ((16, 3000, 3), (3000, 16, 3), (16, 16, 3)):
        assert photos.detector().detect(np.full(shape, 200, np.uint8)) == []


def test_wrong_arrays_are_refused():
    for image in (np.zeros((10, 10), np.uint8), np.zeros((10, 10, 4), np.uint8), np.zeros((10, 10, 3), np.float32)):
        with pytest.raises(ValueError, match="uint8"):
            photos.detector().detect(image)


def test_choose_face_of_a_list():
    face = photos.portrait_landmarks()
    assert choose_face([face, face], 1) is face
    with pytest.raises(UserError, match="1 face"):
        choose_face([face], 3)


# --- self-occlusion -------------------------------------------------------------------------------------------------


def test_the_far_side_of_a_turned_head_is_hidden():
    from rigfit.photo.align import standard_face

    assert not self_occluded(np.array(standard_face())).any()
    for yaw_deg, far in ((50, mesh478.LEFT_EYE), (-50, mesh478.RIGHT_EYE)):
        yaw = np.radians(yaw_deg)
        turn = np.array([[np.cos(yaw), 0, -np.sin(yaw)], [0, 1, 0], [np.sin(yaw), 0, np.cos(yaw)]])
        points = standard_face() @ turn.T
        hidden = self_occluded(points)
        near = mesh478.RIGHT_EYE if far is mesh478.LEFT_EYE else mesh478.LEFT_EYE
        depth_far, depth_near = points[list(far), 2].mean(), points[list(near), 2].mean()
        assert depth_far > depth_near, "the test turns the head the way it says"
        assert hidden[list(far)].mean() > hidden[list(near)].mean()
        assert not hidden[list(near)].any()
        assert 0.05 < hidden.mean() < 0.45


# --- quality of service ---------------------------------------------------------------------------------------------


def test_a_warm_detection_is_quick():
    """0.15 s of processor time on a quiet machine; twice that here, because test machines are shared."""
    times = []
    for _ in range(5):
        start = time.process_time()
        photos.detector().detect(photos.portrait())
        times.append(time.process_time() - start)
    assert min(times) < 0.3


def test_silent_and_light():
    """Nothing is printed by the C++ side, and no plotting or tensor library is pulled in."""
    script = (
        "import sys, skimage.data\n"
        "from rigfit.photo.landmarks import MediapipeDetector\n"
        "faces = MediapipeDetector().detect(skimage.data.astronaut())\n"
        "heavy = {'matplotlib', 'jax', 'tensorflow', 'torch', 'cv2'} & set(sys.modules)\n"
        "import mediapipe\n"
        "print(len(faces), sorted(heavy), mediapipe.solutions.face_mesh.FACEMESH_NUM_LANDMARKS)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 [] 468\n", "the whole of mediapipe stays usable beside it"
    noise = [line for line in done.stderr.splitlines() if "mediapipe.solutions" not in line]
    assert not [line for line in noise if line.startswith(("INFO:", "WARNING: All log", "W0000", "I0000"))], noise


# --- names of the mesh ----------------------------------------------------------------------------------------------


def test_mirror_is_an_involution_that_keeps_the_mesh():
    mirror = mesh478.MIRROR
    assert np.array_equal(mirror[mirror], np.arange(478))
    edges = {tuple(sorted(e)) for e in mesh478.edges().tolist()}
    mirrored = {tuple(sorted(mirror[list(e)].tolist())) for e in edges}
    # The mesh is triangulated a little differently on the two sides: three quads have the other diagonal.
    assert len(edges - mirrored) == 6
    for name, points in mesh478.names().items():
        other = name.replace("right", "?").replace("left", "right").replace("?", "left")
        assert {int(mirror[p]) for p in points} == set(mesh478.names()[other]), name
    for points in (mesh478.STABLE, mesh478.VIEW_DEPENDENT):
        assert len(set(points)) == len(points)
        assert {int(mirror[p]) for p in points} == set(points)


def test_contours_are_closed_loops_of_mesh_edges():
    edges = {tuple(sorted(e)) for e in mesh478.edges().tolist()}
    for name in ("face_oval", "lips_outer", "lips_inner", "right_eye", "left_eye"):
        loop = mesh478.names()[name]
        for a, b in zip(loop, (*loop[1:], loop[0]), strict=True):
            assert tuple(sorted((a, b))) in edges, (name, a, b)


def test_triangles_have_holes_only_at_eyes_and_mouth():
    triangles = mesh478.triangles()
    assert triangles.shape == (852, 3)
    count: dict[tuple[int, int], int] = {}
    for a, b, c in triangles.tolist():
        for edge in ((a, b), (b, c), (a, c)):
            count[tuple(sorted(edge))] = count.get(tuple(sorted(edge)), 0) + 1
    border = {p for edge, uses in count.items() if uses == 1 for p in edge}
    assert max(count.values()) == 2
    rims = mesh478.FACE_OVAL + mesh478.LIPS_INNER + mesh478.RIGHT_EYE + mesh478.LEFT_EYE
    assert border == set(rims)


# --- landmark files -------------------------------------------------------------------------------------------------


def test_landmark_file_round_trip(tmp_path):
    path = tmp_path / "landmarks.json"
    face = photos.portrait_landmarks()
    save_landmark_file(path, face, (512, 512))
    loaded = load_landmark_file(path, (512, 512))
    assert np.abs(loaded.points_px - face.points_px).max() < 1e-3
    assert loaded.visible.all()
    assert (loaded.score, loaded.rotation_deg) == (1.0, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["landmarks.json"], "no temporary file stays"
    assert photos.difference_percent(load_landmark_file(path, (256, 256)), np.array([[2.0, 0, 0], [0, 2, 0]])) < 0.01


def test_landmark_file_with_some_points(tmp_path):
    path = tmp_path / "some.json"
    some = {str(i): photos.portrait_landmarks().points_px[i].tolist() for i in (33, 263, 61, 291, 1, 152)}
    path.write_text(json.dumps({"schema": "rigfit.landmarks/1", "points": {**some, "10": None}}), "utf-8")
    face = load_landmark_file(path)
    assert np.isfinite(face.points_px).all(axis=1).sum() == face.visible.sum() == 6
    listed = [some.get(str(i)) for i in range(478)]
    path.write_text(json.dumps({"schema": "rigfit.landmarks/1", "points": listed}), "utf-8-sig")
    assert np.array_equal(load_landmark_file(path).points_px, face.points_px, equal_nan=True)
    upside_down = {k: [512 - x, 512 - y] for k, (x, y) in some.items()}
    path.write_text(json.dumps({"schema": "rigfit.landmarks/1", "points": upside_down}), "utf-8")
    assert load_landmark_file(path).rotation_deg == 180


GOOD = {str(i): [float(i), float(i % 7) * 10] for i in range(0, 80, 8)}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1"),
        ("[]", "schema"),
        (json.dumps({"points": GOOD}), "schema"),
        (json.dumps({"schema": "rigfit.landmarks/2", "points": GOOD}), "schema"),
        (json.dumps({"schema": "rigfit.landmarks/1"}), "points"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {"33": [1, 2]}}), "1 points"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {**GOOD, "478": [1, 2]}}), "478"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {**GOOD, "nose": [1, 2]}}), "nose"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {**GOOD, "1": [1]}}), "point 1"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {**GOOD, "1": [1, "2"]}}), "point 1"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {**GOOD, "1": [1, float("nan")]}}), "point 1"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": [[1, 2]] * 68}), "68"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": {k: [5, 5] for k in GOOD}}), "one spot"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": GOOD, "image_size_px": [100]}), "image_size_px"),
        (json.dumps({"schema": "rigfit.landmarks/1", "points": GOOD, "image_size_px": [900, 100]}), "900 × 100"),
    ],
)
def test_bad_landmark_files(tmp_path, content, says):
    path = tmp_path / "bad.json"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError) as caught:
        load_landmark_file(path, (512, 512))
    assert caught.value.kind == "bad_landmarks"
    assert says in caught.value.message
    assert "bad.json" in caught.value.message


def test_missing_and_unwritable_landmark_files(tmp_path):
    with pytest.raises(UserError) as caught:
        load_landmark_file(tmp_path / "none.json")
    assert caught.value.kind == "landmarks_missing"
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01" * 20)
    with pytest.raises(UserError, match="UTF-8"):
        load_landmark_file(tmp_path / "binary.json")
    with pytest.raises(UserError) as caught:
        save_landmark_file(tmp_path / "no folder" / "a.json", photos.portrait_landmarks())
    assert caught.value.kind == "file_unwritable"


def test_matrices_of_the_test_photos_are_right():
    """The helper that turns the portrait returns the matrix back, so that the tests above compare the same points."""
    _, back = photos.turned(30)
    center = apply_2d(invert_2d(back), np.array([226.0, 125.0]))
    assert center == pytest.approx([200, 200])
