# SPDX-License-Identifier: GPL-3.0-or-later
"""Random faces, cameras and lights, numbered: sample i of a seed is the same whatever else is drawn. No bpy in here.

Faces. A face parameter is drawn as a *strength* from −1 (its minimum) over 0 (its default) to 1 (its maximum).
Details are normal and cut off; within a region (first word of the name: nose, mouth, …) their root sum of squares is
capped, so that many strong parameters of a region do not add up to a monster. The default head's whole-face parameters
(sex, age, ancestry, weight, muscle) have rules of their own. On a rig whose parameters reach farther than those of the
default head all details shrink, so that a face leaves the neutral one by a plausible distance. Expressions are few
actions at once, left and right mostly together.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..messages import RigError

SCHEMA = "rigfit.samples/1"
LARGEST_COUNT = 1_000_000


@dataclass(frozen=True)
class SamplingConfig:
    """What is drawn. Pairs are (lowest, highest)."""

    detail_deviation: float = 0.25
    """Standard deviation of the strength of an identity detail, before it is cut off."""
    detail_cut: float = 0.9
    """Largest strength of an identity detail."""
    one_sided_active: float = 0.2
    """Probability that an identity parameter without a negative side (a head shape) is not at its default."""
    region_limit: float = 0.9
    """Largest root sum of squares of the strengths of the details of one region."""
    macro_deviation: float = 0.3
    """Standard deviation of the strength of age, weight and muscle."""
    identity_percent: float = 2.5
    """Largest RMS displacement of the face's vertices by identity details over all faces, in % of the face's size."""
    neutral_share: float = 0.25
    """Share of samples with a neutral expression."""
    largest_actions: int = 5
    """Largest number of expression actions at once; a left/right pair is one action."""
    together_share: float = 0.85
    """Probability that an action with two sides has both."""
    action_strength: tuple[float, float] = (0.15, 1.0)
    """Strength of an expression action."""
    yaw_deg: tuple[float, float] = (-30.0, 30.0)
    """Turn of the head about its vertical axis; positive: the face turns to the left of the picture."""
    pitch_deg: tuple[float, float] = (-15.0, 15.0)
    """Nod; positive: the face looks down."""
    roll_deg: tuple[float, float] = (-15.0, 15.0)
    """Turn in the picture's plane; positive: clockwise as seen."""
    focal_mm: tuple[float, float] = (35.0, 135.0)
    """Focal length on a sensor 36 mm wide; drawn evenly in its logarithm."""
    face_fill: tuple[float, float] = (0.45, 0.70)
    """Height of the face as a share of the picture's height."""
    offset: float = 0.06
    """Largest distance of the face's centre from the picture's centre on each axis, as a share of the height."""
    key_azimuth_deg: tuple[float, float] = (-70.0, 70.0)
    """Key light, about the vertical from the camera's side."""
    key_elevation_deg: tuple[float, float] = (-5.0, 55.0)
    """Key light above the horizon."""
    key_size: tuple[float, float] = (0.4, 3.0)
    """Edge of the key light in face sizes, at a distance of four."""
    temperature_k: tuple[float, float] = (3500.0, 8000.0)
    """Colour temperature of the key light."""
    exposure: tuple[float, float] = (0.75, 1.3)
    """Brightness of a white surface that faces the key light, 1 being displayed white."""
    world: tuple[float, float] = (0.08, 0.45)
    """Light from everywhere, in the same unit; part of the exposure."""
    fill: tuple[float, float] = (0.05, 0.6)
    """Fill light as a share of the key light."""
    rim: tuple[float, float] = (0.0, 0.6)
    """Rim light as a share of the key light."""
    background: tuple[float, float] = (0.05, 0.95)
    """Grey level (sRGB) of the background."""
    background_tint: float = 0.15
    """Largest deviation of a background channel from grey."""


DEFAULT_CONFIG = SamplingConfig()

# --- numbered random numbers ------------------------------------------------------------------------------------------

_IDENTITY, _EXPRESSION, _APPEARANCE, _CAMERA, _LIGHT = range(5)


class Draws:
    """The random numbers of one sample and one stream: Philox (Salmon et al. 2011) keyed by seed and index.

    Only the raw words of the generator are used, which numpy promises never to change.
    """

    def __init__(self, seed: int, index: int, stream: int) -> None:
        self._words = np.random.Philox(
            key=np.array([seed, index], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64)
        )

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Evenly from [low, high)."""
        return low + (high - low) * (int(self._words.random_raw()) >> 11) * 2.0**-53

    def log_uniform(self, low: float, high: float) -> float:
        """Evenly in the logarithm."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def normal(self, deviation: float, cut: float) -> float:
        """Normal around 0 (Box and Muller 1958), drawn again until it lies within ±cut."""
        while True:
            radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
            value = deviation * radius * math.cos(2.0 * math.pi * self.uniform())
            if abs(value) <= cut:
                return value

    def choose(self, weights: Sequence[float]) -> int:
        """An index with probability proportional to its weight."""
        target = self.uniform(0.0, math.fsum(weights))
        for index, weight in enumerate(weights):
            target -= weight
            if target < 0:
                return index
        return len(weights) - 1


# --- samples ----------------------------------------------------------------------------------------------------------


def sample(
    parameters: Sequence[dict],
    seed: int,
    index: int,
    *,
    centre: Iterable[float],
    size_m: float,
    width: int = 512,
    height: int = 512,
    identity_scale: float = 1.0,
    config: SamplingConfig = DEFAULT_CONFIG,
) -> dict:
    """Sample `index` of `seed`: {"values": (P,) float32, "camera": camera JSON, "light": light}.

    parameters: those of the rig spec's JSON (name, group, minimum, maximum, default), P of them. centre (3,), size_m:
    middle and height of the face, metres, rig frame. width, height: of the picture, pixels. identity_scale: from
    `identity_scale`. Parameters of the group `pose` keep their default. RigError bad_sampling.
    """
    for name, value in (("seed", seed), ("index", index)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise RigError("bad_sampling", reason=f"{name} must be a whole number from 0")
    strengths = {}
    strengths.update(_identity(_names(parameters, "identity"), Draws(seed, index, _IDENTITY), identity_scale, config))
    strengths.update(_expression(_names(parameters, "expression"), Draws(seed, index, _EXPRESSION), config))
    appearance = Draws(seed, index, _APPEARANCE)
    values = np.zeros(len(parameters), np.float32)
    for place, parameter in enumerate(parameters):
        low, high, default = parameter["minimum"], parameter["maximum"], parameter["default"]
        if parameter["group"] == "appearance":
            value = appearance.uniform(low, high)
        else:
            strength = strengths.get(parameter["name"], 0.0)
            value = default + strength * (high - default if strength > 0 else default - low)
        values[place] = _inside(value, low, high)
    return {
        "values": values,
        "camera": _camera(Draws(seed, index, _CAMERA), np.asarray(list(centre), float), size_m, width, height, config),
        "light": _light(Draws(seed, index, _LIGHT), np.asarray(list(centre), float), size_m, config),
    }


def _names(parameters: Sequence[dict], group: str) -> dict[str, bool]:
    """{name: has a negative side} of the parameters of a group, in order."""
    return {item["name"]: item["minimum"] < item["default"] for item in parameters if item["group"] == group}


def _inside(value: float, low: float, high: float) -> np.float32:
    """The float32 nearest to `value` that is not outside [low, high] once it is float64 again."""
    rounded = np.float32(min(max(value, low), high))
    if float(rounded) > high:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    if float(rounded) < low:
        rounded = np.nextafter(rounded, np.float32(np.inf))
    return rounded


# --- identity ---------------------------------------------------------------------------------------------------------

_WHOLE_FACE = ("sex", "age", "weight", "muscle")
_ANCESTRY = "ancestry-"


def region(name: str) -> str:
    """The first word of a parameter name: "nose" of nose-hump, NoseWidth, nose_tip and nose.001."""
    words = re.findall(r"[A-Z]*[a-z]+|[A-Z]+|[^\W\d_]+", name)
    return words[0].lower() if words else name


def is_whole_face(names: Iterable[str]) -> bool:
    """Whether the parameters are the default head's, whose whole-face parameters have rules of their own."""
    return set(_WHOLE_FACE) <= set(names)


def _identity(names: dict[str, bool], draws: Draws, scale: float, config: SamplingConfig) -> dict[str, float]:
    strengths: dict[str, float] = {}
    special = is_whole_face(names)
    ancestries = [name for name in names if special and name.startswith(_ANCESTRY)]
    if ancestries:
        # Evenly from the simplex: normalised exponentials. The keys are offsets from the equal mixture, so a part
        # that all have in common moves nothing; without it each face has one set of values.
        shares = [-math.log(1.0 - draws.uniform()) for _ in ancestries]
        total, least = math.fsum(shares), min(shares)
        strengths.update({name: (share - least) / total for name, share in zip(ancestries, shares, strict=True)})
    regions: dict[str, list[str]] = {}
    for name, two_sided in names.items():
        if name in strengths:
            continue
        if special and name == "sex":
            # Two soft humps, women and men.
            side = 0.6 if draws.uniform() < 0.5 else -0.6
            strengths[name] = min(max(side + draws.normal(0.25, 0.6), -1.0), 1.0)
            continue
        if special and name in _WHOLE_FACE:
            value = draws.normal(config.macro_deviation, 0.9)
            # The child's end of age is far from all others: adults with some youth, as in the pictures that are fitted.
            strengths[name] = 0.3 * value if name == "age" and value < 0 else value
            continue
        if two_sided:
            value = draws.normal(config.detail_deviation, config.detail_cut)
        else:
            # Both numbers are drawn always, so that one parameter's outcome does not shift the next one's.
            active, value = draws.uniform(), abs(draws.normal(config.detail_deviation, config.detail_cut))
            value = value if active < config.one_sided_active else 0.0
        strengths[name] = value
        regions.setdefault(region(name), []).append(name)
    for members in regions.values():
        strength = math.sqrt(math.fsum(strengths[name] ** 2 for name in members))
        factor = scale * min(1.0, config.region_limit / strength) if strength > 0 else 1.0
        for name in members:
            strengths[name] *= factor
    return strengths


# --- expression -------------------------------------------------------------------------------------------------------

# How often an ARKit action is picked, relative to 1, and what excludes each other. By the name without its side.
_FREQUENT = {
    "mouthSmile": 5.0,
    "jawOpen": 5.0,
    "eyeBlink": 3.0,
    "eyeSquint": 2.0,
    "browInnerUp": 2.0,
    "browDown": 2.0,
    "browOuterUp": 2.0,
    "eyeLook": 3.0,
    "tongueOut": 0.3,
    "jawForward": 0.5,
}
_EXCLUSIVE = (
    {"mouthSmile", "mouthFrown", "mouthPucker", "mouthFunnel"},
    {"mouthPucker", "mouthFunnel", "mouthStretch", "mouthDimple", "tongueOut"},
    {"mouthPress", "mouthFunnel", "jawOpen", "tongueOut"},
    {"mouthRollLower", "mouthLowerDown", "mouthShrugLower", "mouthFunnel", "mouthPress"},
    {"mouthRollUpper", "mouthUpperUp", "mouthShrugUpper", "mouthFunnel", "mouthPress"},
    {"cheekPuff", "jawOpen", "mouthFunnel", "mouthUpperUp", "mouthLowerDown", "tongueOut"},
    {"jawLeft", "jawRight"},
    {"mouthLeft", "mouthRight"},
    {"eyeBlink", "eyeWide"},
    {"eyeSquint", "eyeWide"},
    {"browDown", "browOuterUp"},
    {"browDown", "browInnerUp"},
)
# Where each eye looks when both look to one's left, right, up and down.
_GAZES = (
    ("eyeLookOutLeft", "eyeLookInRight"),
    ("eyeLookInLeft", "eyeLookOutRight"),
    ("eyeLookUpLeft", "eyeLookUpRight"),
    ("eyeLookDownLeft", "eyeLookDownRight"),
)
# These need an open jaw of at least this share of their own strength.
_NEED_JAW = {"mouthClose": 1.0, "tongueOut": 0.6}


def split_side(name: str) -> tuple[str, str]:
    """(name without its side, "left" | "right" | ""): mouthSmileLeft, smile_L, Brow.R, cheek-left, L_brow.

    jawLeft and mouthRight move the whole jaw or mouth to a side: they have no other half of their own face.
    """
    if name in ("jawLeft", "jawRight", "mouthLeft", "mouthRight"):
        return name, ""
    if match := re.match(r"^(?P<stem>.+?)(?:[._\- ]?(?P<long>Left|Right)|[._\- ](?P<short>left|right|L|R|l|r))$", name):
        side = match["long"] or match["short"]
        return match["stem"], "left" if side[0] in "Ll" else "right"
    if match := re.match(r"^(?P<side>left|right|Left|Right|LEFT|RIGHT|L|R|l|r)[._\- ](?P<stem>.+)$", name):
        return match["stem"], "left" if match["side"][0] in "Ll" else "right"
    return name, ""


def actions(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{action: its parameters}: two sides of one name are one action; the ARKit gaze directions are one each."""
    have = list(names)
    out: dict[str, tuple[str, ...]] = {}
    gazes = [pair for pair in _GAZES if set(pair) <= set(have)]
    looking = {name for pair in gazes for name in pair}
    sides: dict[str, list[str]] = {}
    for name in have:
        if name not in looking:
            sides.setdefault(split_side(name)[0], []).append(name)
    for stem, members in sides.items():
        both = len(members) == 2 and {split_side(name)[1] for name in members} == {"left", "right"}
        if both or len(members) == 1:
            out[stem] = tuple(members)
        else:
            out.update({name: (name,) for name in members})
    out.update({f"eyeLook {place}": pair for place, pair in enumerate(gazes)})
    return out


def _expression(names: dict[str, bool], draws: Draws, config: SamplingConfig) -> dict[str, float]:
    known = actions(names)
    if not known or draws.uniform() < config.neutral_share:
        return {}
    waiting = list(known)
    picked: list[str] = []
    for _ in range(1 + int(draws.uniform(0, config.largest_actions))):
        waiting = [name for name in waiting if not any(_exclude(name, other) for other in picked)]
        if not waiting:
            break
        picked.append(waiting.pop(draws.choose([_FREQUENT.get(_stem(name), 1.0) for name in waiting])))
    strengths: dict[str, float] = {}
    low, high = config.action_strength
    for action in picked:
        members = known[action]
        # The exponent leaves strong expressions in, but rarer than slight ones.
        strength = low + (high - low) * draws.uniform() ** 1.5
        alone, which = draws.uniform() >= config.together_share, draws.uniform()
        gaze = action.startswith("eyeLook ")
        for place, name in enumerate(members):
            difference = draws.uniform(0.85, 1.0)
            if len(members) == 2 and alone and not gaze and place == int(2 * which):
                continue
            value = strength * (1.0 if gaze else difference)
            strengths[name] = -value if names[name] and draws.uniform() < 0.5 else value
    for name, share in _NEED_JAW.items():
        if name in strengths and "jawOpen" in names:
            strengths["jawOpen"] = max(strengths.get("jawOpen", 0.0), share * strengths[name])
    return strengths


def _stem(action: str) -> str:
    return "eyeLook" if action.startswith("eyeLook ") else action


def _exclude(first: str, second: str) -> bool:
    # Two gazes at once are opposite or diagonal; one is enough.
    if _stem(first) == _stem(second) == "eyeLook":
        return True
    return any(first in group and second in group for group in _EXCLUSIVE)


# --- camera and light -------------------------------------------------------------------------------------------------

# Rig frame to camera frame of a camera that looks at the face from the front.
_FRONT = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]])


def _turn(axis: int, angle_deg: float) -> np.ndarray:
    """Right-handed rotation about a camera axis (0 right, 1 down, 2 forward)."""
    c, s = math.cos(math.radians(angle_deg)), math.sin(math.radians(angle_deg))
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.eye(3)
    matrix[i, i] = matrix[j, j] = c
    matrix[i, j], matrix[j, i] = -s, s
    return matrix


def _camera(draws: Draws, centre: np.ndarray, size_m: float, width: int, height: int, config: SamplingConfig) -> dict:
    yaw, pitch, roll = (draws.uniform(*span) for span in (config.yaw_deg, config.pitch_deg, config.roll_deg))
    focal_px = draws.log_uniform(*config.focal_mm) / 36.0 * width
    fill = draws.uniform(*config.face_fill)
    offset = np.array([draws.uniform(-1, 1), draws.uniform(-1, 1)]) * config.offset * height
    rotation = _turn(2, roll) @ _turn(0, pitch) @ _turn(1, yaw) @ _FRONT
    distance = size_m * focal_px / (fill * height)
    middle = np.array([*(offset * distance / focal_px), distance])
    return {
        "width": int(width),
        "height": int(height),
        "focal_px": focal_px,
        "principal_px": [width / 2, height / 2],
        "rotation": rotation.tolist(),
        "translation": (middle - rotation @ centre).tolist(),
    }


def _light(draws: Draws, centre: np.ndarray, size_m: float, config: SamplingConfig) -> dict:
    azimuth, elevation = draws.uniform(*config.key_azimuth_deg), draws.uniform(*config.key_elevation_deg)
    size, temperature = draws.log_uniform(*config.key_size), draws.uniform(*config.temperature_k)
    exposure, world = draws.uniform(*config.exposure), draws.uniform(*config.world)
    fill, rim = draws.uniform(*config.fill), draws.uniform(*config.rim)
    grey = draws.uniform(*config.background)
    tint = [draws.uniform(-1, 1) * config.background_tint for _ in range(3)]
    return {
        "azimuth_deg": azimuth,
        "elevation_deg": elevation,
        "size": size,
        # The fill light adds to what faces the key by about the cosine of the angle between the two.
        "strength": (exposure - world) / (1.0 + 0.2 * fill),
        "temperature_k": temperature,
        "fill": fill,
        "rim": rim,
        "world": world,
        "centre": centre.tolist(),
        "size_m": float(size_m),
        "background": [min(max(grey + value, 0.0), 1.0) for value in tint],
    }


# --- from a rig spec --------------------------------------------------------------------------------------------------


def face_frame(spec: dict) -> tuple[np.ndarray, float, np.ndarray]:
    """(centre (3,), size_m, vertices (N,) int): where the face of a rig is, and which vertices make it.

    spec: the arrays of a rig spec, with the parsed JSON under "document". The height of the embedded landmarks if there
    are any; else of the vertices that expressions move (a body's legs do not count); else of the skin.
    """
    neutral = spec["neutral"].astype(np.float64)
    triangles = spec["triangles"]
    document = spec["document"]
    moved = _moved(spec, "expression")
    if not moved.any():
        skin = np.isin(spec["part"], [i for i, name in enumerate(document["parts"]) if name in ("skin", "lips")])
        moved[triangles[skin].ravel() if skin.any() else triangles.ravel()] = True
    face = np.flatnonzero(moved)
    points = neutral[face]
    if "landmark_triangle" in spec and (spec["landmark_triangle"] >= 0).sum() >= 100:
        there = spec["landmark_triangle"] >= 0
        corners = neutral[triangles[spec["landmark_triangle"][there]]]
        points = np.einsum("nij,ni->nj", corners, spec["landmark_barycentric"][there].astype(np.float64))
    # Percentiles: one stray vertex must not move the camera.
    low, high = np.percentile(points, 0.5, axis=0), np.percentile(points, 99.5, axis=0)
    size = float(high[2] - low[2])
    if not size > 0:
        raise RigError("bad_sampling", reason="the rig's face has no height")
    return (low + high) / 2, size, face


def _moved(spec: dict, group: str) -> np.ndarray:
    """(V,) bool: vertices that some shape of a group moves by at least 5 % of the shape's largest displacement."""
    moved = np.zeros(len(spec["neutral"]), bool)
    for parameter in spec["document"]["parameters"]:
        if parameter["group"] != group or parameter["shape"] is None:
            continue
        rows = slice(*spec["shape_offsets"][parameter["shape"] : parameter["shape"] + 2])
        length = np.linalg.norm(spec["shape_deltas"][rows], axis=1)
        moved[spec["shape_vertices"][rows][length >= 0.05 * length.max(initial=0.0)]] = True
    return moved


def identity_scale(spec: dict, size_m: float, face: np.ndarray, config: SamplingConfig = DEFAULT_CONFIG) -> float:
    """Factor (0…1] for identity strengths that keeps the RMS displacement of the face within `identity_percent`.

    Independent details: mean square displacement = Σ over parameters of variance · mean |delta · reach|². The default
    head's whole-face parameters do not count. spec as in `face_frame`, face (N,) vertex ids.
    """
    parameters = [item for item in spec["document"]["parameters"] if item["group"] == "identity"]
    special = is_whole_face(item["name"] for item in parameters)
    inside = np.zeros(len(spec["neutral"]), bool)
    inside[face] = True
    total = 0.0
    for item in parameters:
        if item["shape"] is None or (special and (item["name"] in _WHOLE_FACE or item["name"].startswith(_ANCESTRY))):
            continue
        share = 1.0 if item["minimum"] < item["default"] else config.one_sided_active
        reach = max(item["maximum"] - item["default"], item["default"] - item["minimum"])
        rows = slice(*spec["shape_offsets"][item["shape"] : item["shape"] + 2])
        deltas = spec["shape_deltas"][rows][inside[spec["shape_vertices"][rows]]].astype(np.float64)
        total += share * (config.detail_deviation * reach) ** 2 * float((deltas**2).sum())
    percent = 100.0 * math.sqrt(total / max(len(face), 1)) / size_m
    return min(1.0, config.identity_percent / percent) if percent > 0 else 1.0


def read_spec(path: str) -> dict:
    """The arrays of a rig spec that sampling needs, with the parsed JSON under "document". RigError bad_sampling."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            spec = {
                name: archive[name]
                for name in (
                    *("neutral", "triangles", "part", "shape_offsets", "shape_vertices", "shape_deltas"),
                    *(name for name in ("landmark_triangle", "landmark_barycentric") if name in archive),
                )
            }
            spec["document"] = json.loads(bytes(archive["json"]).decode("utf-8"))
        if not str(spec["document"]["schema"]).startswith("rigfit.rig/"):
            raise ValueError("its schema is not rigfit.rig")
        for item in spec["document"]["parameters"]:
            if not item["minimum"] <= item["default"] <= item["maximum"]:
                raise ValueError(f"the range of {item['name']} is wrong")
    except FileNotFoundError:
        raise RigError("file_missing", path=path) from None
    except Exception as error:  # np.load raises a dozen kinds for a broken archive
        raise RigError("bad_sampling", reason=f"{path} is not a rig spec: {error}") from None
    return spec


def write_samples(
    spec: str,
    *,
    seed: int,
    start: int,
    count: int,
    out: str,
    width: int = 512,
    height: int = 512,
    config: SamplingConfig = DEFAULT_CONFIG,
) -> dict:
    """Samples start … start+count−1 of `seed` for the rig spec at path `spec`, as an .npz without pickles at `out`.

    Arrays: `values` (count,P) float32 in spec order; `json` uint8, UTF-8 of {"schema", "seed", "start", "parameters"
    (names), "cameras" (camera JSONs for width × height), "lights"}. Returns {"count", "parameters": P}.
    RigError bad_sampling, file_missing, file_unwritable; written under a temporary name, then renamed.
    """
    for name, value, low, high in (
        ("count", count, 1, LARGEST_COUNT),
        ("start", start, 0, 2**62),
        ("width", width, 4, 16384),
        ("height", height, 4, 16384),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RigError("bad_sampling", reason=f"{name} must be a whole number from {low} to {high}")
    rig = read_spec(spec)
    parameters = rig["document"]["parameters"]
    centre, size_m, face = face_frame(rig)
    scale = identity_scale(rig, size_m, face, config)
    drawn = [
        sample(
            parameters,
            seed,
            index,
            centre=centre,
            size_m=size_m,
            width=width,
            height=height,
            identity_scale=scale,
            config=config,
        )
        for index in range(start, start + count)
    ]
    document = {
        "schema": SCHEMA,
        "seed": seed,
        "start": start,
        "parameters": [item["name"] for item in parameters],
        "cameras": [item["camera"] for item in drawn],
        "lights": [item["light"] for item in drawn],
    }
    text = np.frombuffer(json.dumps(document, allow_nan=False).encode("utf-8"), np.uint8)
    out = os.path.abspath(out)
    temporary = os.path.join(os.path.dirname(out), f".rigfit-{os.getpid()}.tmp.npz")
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, values=np.stack([item["values"] for item in drawn]), json=text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except OSError as error:
        raise RigError("file_unwritable", path=out, reason=error.strerror or str(error)) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return {"count": count, "parameters": len(parameters)}


# --- light ------------------------------------------------------------------------------------------------------------

# What a light is. Angles: azimuth about the vertical from the camera's side (positive: to the right of the picture
# for an upright camera), elevation above the horizon. size: edge in subject sizes. strength: brightness that it alone
# gives a white surface facing it, 1 being displayed white; fill and rim are shares of it, world adds to it. background:
# sRGB. centre (metres, rig frame) and size_m: the subject; without them it is what the camera looks at.
DEFAULT_LIGHT: dict = {
    "azimuth_deg": 30.0,
    "elevation_deg": 30.0,
    "size": 1.5,
    "strength": 0.9,
    "temperature_k": 5600.0,
    "fill": 0.35,
    "rim": 0.3,
    "world": 0.3,
    "centre": None,
    "size_m": None,
    "background": [0.5, 0.5, 0.5],
}


def check_light(light: dict) -> dict:
    """Check a complete light. RigError bad_light with the reason."""
    unknown = set(light) - set(DEFAULT_LIGHT)
    if unknown:
        raise RigError("bad_light", reason=f"it has an unknown part {sorted(unknown)[0]}")
    checked = dict(light)
    for name, low, high in (
        ("azimuth_deg", -360.0, 360.0),
        ("elevation_deg", -90.0, 90.0),
        ("size", 1e-3, 100.0),
        ("strength", 0.0, 100.0),
        ("temperature_k", 1667.0, 25000.0),
        ("fill", 0.0, 100.0),
        ("rim", 0.0, 100.0),
        ("world", 0.0, 100.0),
    ):
        value = light[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise RigError("bad_light", reason=f"{name} must be a number from {low:g} to {high:g}")
        checked[name] = float(value)
    if (light["centre"] is None) != (light["size_m"] is None):
        raise RigError("bad_light", reason="centre and size_m belong together")
    if light["centre"] is not None:
        centre = np.asarray(light["centre"], dtype=np.float64)
        if centre.shape != (3,) or not np.isfinite(centre).all():
            raise RigError("bad_light", reason="centre must be three finite numbers")
        size = light["size_m"]
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < math.inf:
            raise RigError("bad_light", reason="size_m must be a positive number")
        checked["centre"], checked["size_m"] = centre.tolist(), float(size)
    try:
        background = [float(value) for value in light["background"]]
    except (TypeError, ValueError):
        background = []
    if len(background) != 3 or not all(0.0 <= value <= 1.0 for value in background):
        raise RigError("bad_light", reason="background must be three numbers from 0 to 1")
    checked["background"] = background
    return checked


def blackbody_rgb(temperature_k: float) -> tuple[float, float, float]:
    """Linear sRGB colour of a black body, luminance 1, 1667 K to 25000 K.

    Chromaticity: the cubic splines of Kim et al., US patent 7024034 (2006), as widely tabulated; XYZ to linear sRGB by
    IEC 61966-2-1. Components below zero (outside the sRGB gamut) become zero.
    """
    inverse = 1e3 / temperature_k
    if temperature_k < 4000:
        x = -0.2661239 * inverse**3 - 0.2343589 * inverse**2 + 0.8776956 * inverse + 0.179910
    else:
        x = -3.0258469 * inverse**3 + 2.1070379 * inverse**2 + 0.2226347 * inverse + 0.240390
    if temperature_k < 2222:
        y = -1.1063814 * x**3 - 1.34811020 * x**2 + 2.18555832 * x - 0.20219683
    elif temperature_k < 4000:
        y = -0.9549476 * x**3 - 1.37418593 * x**2 + 2.09137015 * x - 0.16748867
    else:
        y = 3.0817580 * x**3 - 5.87338670 * x**2 + 3.75112997 * x - 0.37001483
    xyz = np.array([x / y, 1.0, (1 - x - y) / y])
    to_rgb = np.array(
        [[3.2404542, -1.5371385, -0.4985314], [-0.9692660, 1.8760108, 0.0415560], [0.0556434, -0.2040259, 1.0572252]]
    )
    rgb = np.maximum(to_rgb @ xyz, 0.0)
    rgb /= rgb @ np.array([0.2126729, 0.7151522, 0.0721750])
    return (float(rgb[0]), float(rgb[1]), float(rgb[2]))
