# SPDX-License-Identifier: Apache-2.0
"""The rig spec file: what Blender exports of a face rig and every backend module reads.

Format and meaning of each array: docs/architecture.md, "Rig spec". Frame of all geometry: the rig frame (right-handed,
Z up, metres).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.files import write_atomically

SCHEMA = "rigfit.rig/1"
PARTS = ("skin", "lips", "eye", "iris", "lash", "brow", "teeth", "tongue", "hair", "other")
GROUPS = ("identity", "expression", "pose", "appearance")
LANDMARK_COUNT = 478

# A spec is input from outside: what it may make us allocate is decided before anything is read.
MAX_JSON_BYTES = 64 << 20
MAX_TOTAL_BYTES = 4 << 30
# Arrays beyond this are stored, not deflated: float noise shrinks by a tenth and costs seconds.
_STORE_BYTES = 24 << 20

_REQUIRED: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "neutral": ("float32", (None, 3)),
    "triangles": ("int32", (None, 3)),
    "uv": ("float32", (None, 3, 2)),
    "part": ("uint8", (None,)),
    "shape_offsets": ("int64", (None,)),
    "shape_vertices": ("int32", (None,)),
    "shape_deltas": ("float32", (None, 3)),
}
_LANDMARKS: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "landmark_triangle": ("int32", (LANDMARK_COUNT,)),
    "landmark_barycentric": ("float32", (LANDMARK_COUNT, 3)),
    "landmark_confidence": ("float32", (LANDMARK_COUNT,)),
}
_DETECTOR_PREFIX = "detector_"


@dataclass(frozen=True)
class Source:
    """Where a parameter lives in the .blend file.

    kind: ``shape_key`` (object, key, sign) or ``property`` (object, property, and bone for a pose bone's property).
    sign: +1: the key takes max(p, 0) if the parameter has a source of sign −1, else p itself; −1: it takes max(−p, 0).
    maximum: the key's own slider maximum, where the exporter noted it.
    """

    kind: str
    object: str
    key: str | None = None
    property: str | None = None
    sign: int = 1
    maximum: float | None = None
    bone: str | None = None


@dataclass(frozen=True)
class Parameter:
    """One number that the rig exposes.

    minimum, maximum, default: in units of the parameter, minimum ≤ default ≤ maximum, minimum < maximum.
    shape, negative_shape: rows of `RigSpec.shape_offsets`; see `rigfit.rig.blendshapes.evaluate` for the formula.
    """

    name: str
    group: str
    minimum: float
    maximum: float
    default: float = 0.0
    shape: int | None = None
    negative_shape: int | None = None
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class MeshRange:
    """The vertices ``vertex_start : vertex_start + vertex_count`` of the spec come from this object.

    control_vertices: vertices of the object's mesh before modifiers; −1 where the exporter did not say.
    """

    object: str
    vertex_start: int
    vertex_count: int
    control_vertices: int = -1


@dataclass(frozen=True)
class LeftOut:
    """A key or property that is not a parameter, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class LandmarkEmbedding:
    """The 478 face landmarks as points on the mesh.

    triangle: (478,) int32, row of `RigSpec.triangles`; −1: not embedded.
    barycentric: (478,3) float32, weights of the triangle's corners, sum 1 where embedded.
    confidence: (478,) float32 in 0…1.
    """

    triangle: NDArray[np.int32]
    barycentric: NDArray[np.float32]
    confidence: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RigSpec:
    """A face rig: geometry, sparse shapes and parameters. Immutable; arrays are not to be written to.

    neutral (V,3) float32 metres · triangles (F,3) int32 · uv (F,3,2) float32 · part (F,) uint8 index into `parts` ·
    shape_offsets (S+1,) int64 · shape_vertices (K,) int32 · shape_deltas (K,3) float32 metres per unit ·
    detector: the arrays ``detector_NAME`` of the file as ``{NAME: array}``; detector_json: the JSON key ``detector``.
    An empty `rig_hash` is computed.
    """

    neutral: NDArray[np.float32]
    triangles: NDArray[np.int32]
    uv: NDArray[np.float32]
    part: NDArray[np.uint8]
    shape_offsets: NDArray[np.int64]
    shape_vertices: NDArray[np.int32]
    shape_deltas: NDArray[np.float32]
    parameters: tuple[Parameter, ...]
    parts: tuple[str, ...] = PARTS
    meshes: tuple[MeshRange, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    linear: bool = True
    warnings: tuple[str, ...] = ()
    rig_hash: str = ""
    blender_version: str = ""
    source: str = ""
    metres_per_unit: float = 1.0
    landmarks: LandmarkEmbedding | None = None
    detector: Mapping[str, np.ndarray] = field(default_factory=dict)
    detector_json: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _validate(self)
        if not self.rig_hash:
            object.__setattr__(self, "rig_hash", compute_rig_hash(self))

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names in spec order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def minimum(self) -> NDArray[np.float64]:
        """(P,) float64 lower limits."""
        return np.array([parameter.minimum for parameter in self.parameters], dtype=np.float64)

    @property
    def maximum(self) -> NDArray[np.float64]:
        """(P,) float64 upper limits."""
        return np.array([parameter.maximum for parameter in self.parameters], dtype=np.float64)

    @property
    def default(self) -> NDArray[np.float64]:
        """(P,) float64 defaults: the values that `neutral` stands for."""
        return np.array([parameter.default for parameter in self.parameters], dtype=np.float64)

    def group(self, name: str) -> NDArray[np.bool_]:
        """(P,) bool: which parameters belong to the group."""
        if name not in GROUPS:
            raise ValueError(f"no group {name!r}; groups are {', '.join(GROUPS)}")
        return np.array([parameter.group == name for parameter in self.parameters], dtype=bool)

    @staticmethod
    def load(path: str | os.PathLike[str], *, verify_hash: bool = True) -> RigSpec:
        """Read and check a spec file.

        verify_hash: recompute `rig_hash` and refuse a file whose geometry or parameters were edited afterwards.
        Raises UserError (kind ``bad_spec`` or ``file_missing``) with one sentence.
        """
        path = Path(path)
        try:
            with path.open("rb") as stream:
                arrays, text = _read_archive(path, stream)
        except FileNotFoundError:
            raise UserError(f"There is no rig spec {path}: check the name.", kind="file_missing") from None
        except IsADirectoryError:
            raise UserError(f"{path} is a folder: give the rig spec file (.npz) in it.", kind="bad_spec") from None
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): check its permissions.", kind="bad_spec"
            ) from None
        try:
            spec = _from_json(arrays, text)
        except _BadSpecError as error:
            raise _refuse(path, str(error)) from None
        if verify_hash and spec.rig_hash != compute_rig_hash(spec):
            raise _refuse(path, "its geometry or parameters do not belong to its rig hash")
        return spec

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the spec: temporary name in the same folder, fsync, rename. Raises UserError ``file_unwritable``."""
        path = Path(path)
        arrays: dict[str, np.ndarray] = {"json": np.frombuffer(_to_json(self).encode("ascii"), dtype=np.uint8)}
        arrays |= {name: getattr(self, name) for name in _REQUIRED}
        if self.landmarks is not None:
            arrays |= {name: getattr(self.landmarks, name.removeprefix("landmark_")) for name in _LANDMARKS}
        arrays |= {_DETECTOR_PREFIX + name: array for name, array in self.detector.items()}
        write_atomically(path, lambda temporary: _write_archive(temporary, arrays))

    def with_landmarks(self, embedding: LandmarkEmbedding | None) -> RigSpec:
        """The same rig with another embedding; the detector model belongs to the old one and is dropped."""
        return replace(self, landmarks=embedding, detector={}, detector_json=None)

    def with_detector(self, arrays: Mapping[str, np.ndarray], description: Mapping[str, Any] | None) -> RigSpec:
        """The same rig with a calibrated detector model; array names without the prefix ``detector_``."""
        return replace(self, detector=dict(arrays), detector_json=description)


def compute_rig_hash(spec: RigSpec) -> str:
    """sha256 over what makes two rigs interchangeable; landmarks, detector, file names and versions are left out.

    Coordinates are counted in whole steps of the largest power of two below 1e-5 of the bounding-box diagonal: a power
    of two does not change with the last bits of the diagonal, so Blender versions agree. Rows that round to zero are
    dropped, so a sparser storage of the same shapes has the same hash. The add-on has its own twin of this function
    (`blender_addon/rig/export.py`); a test compares the two.
    """
    low, high = spec.neutral.min(axis=0).astype(np.float64), spec.neutral.max(axis=0).astype(np.float64)
    diagonal = float(np.sqrt(((high - low) ** 2).sum()))
    step = 2.0 ** math.floor(math.log2(1e-5 * diagonal)) if diagonal > 0 else 1.0
    digest = hashlib.sha256(b"rigfit.rig/1\n")
    table = [[p.name, p.group, *(f"{x + 0.0:.6g}" for x in (p.minimum, p.maximum, p.default))] for p in spec.parameters]
    digest.update(json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode("ascii"))
    digest.update(np.ascontiguousarray(spec.triangles, dtype="<i4").tobytes())
    digest.update(np.rint(spec.neutral.astype(np.float64) / step).astype("<i8").tobytes())
    for parameter in spec.parameters:
        for mark, shape in ((b"+", parameter.shape), (b"-", parameter.negative_shape)):
            digest.update(mark)
            if shape is None:
                continue
            rows = slice(int(spec.shape_offsets[shape]), int(spec.shape_offsets[shape + 1]))
            # Exact in float32, since step is a power of two.
            steps = np.rint(spec.shape_deltas[rows] * np.float32(1 / step)).astype("<i4")
            keep = np.flatnonzero((steps[:, 0] | steps[:, 1] | steps[:, 2]) != 0)
            digest.update(np.ascontiguousarray(spec.shape_vertices[rows][keep], dtype="<i4").tobytes())
            digest.update(steps[keep].tobytes())
    return digest.hexdigest()


class _BadSpecError(ValueError):
    """What is wrong with a spec, as the middle of a sentence."""


def _refuse(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a usable rig spec ({reason}): export the rig again.", kind="bad_spec")


# --- checks -----------------------------------------------------------------------------------------------------------


def _require(condition: bool | np.bool_, reason: str) -> None:
    if not condition:
        raise _BadSpecError(reason)


def _check_array(name: str, array: np.ndarray, dtype: str, shape: Sequence[int | None]) -> None:
    _require(isinstance(array, np.ndarray) and array.dtype == np.dtype(dtype), f"array {name} is not {dtype}")
    fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    wanted = "(" + ",".join("N" if size is None else str(size) for size in shape) + ")"
    _require(fits, f"array {name} has shape {array.shape} instead of {wanted}")
    if array.dtype.kind == "f":
        _require(bool(np.isfinite(array).all()), f"array {name} holds numbers that are not finite")


def _validate(spec: RigSpec) -> None:
    """Raise _BadSpecError unless every index, range and shape of the spec is sound."""
    for name, (dtype, shape) in _REQUIRED.items():
        _check_array(name, getattr(spec, name), dtype, shape)
    vertices, faces = len(spec.neutral), len(spec.triangles)
    _require(vertices > 0, "it has no vertices")
    _require(len(spec.uv) == faces, "array uv does not match the triangles")
    _require(len(spec.part) == faces, "array part does not match the triangles")
    if faces:
        _require(spec.triangles.min() >= 0 and spec.triangles.max() < vertices, "a triangle names a missing vertex")
        _require(int(spec.part.max()) < len(spec.parts), "a triangle names a missing part")

    offsets, ids = spec.shape_offsets, spec.shape_vertices
    _require(len(offsets) >= 1 and offsets[0] == 0, "array shape_offsets does not start at 0")
    _require(bool((np.diff(offsets) >= 0).all()), "array shape_offsets is not ascending")
    _require(offsets[-1] == len(ids), "array shape_offsets does not end at the number of shape rows")
    _require(len(spec.shape_deltas) == len(ids), "array shape_deltas does not match shape_vertices")
    if len(ids):
        _require(ids.min() >= 0 and ids.max() < vertices, "a shape names a missing vertex")
        ascending = np.diff(ids) > 0
        starts = offsets[(offsets > 0) & (offsets < len(ids))]
        ascending[starts - 1] = True  # between two shapes anything goes
        _require(bool(ascending.all()), "the vertex ids of a shape are not ascending")

    shapes, seen = len(offsets) - 1, set()
    for parameter in spec.parameters:
        name = parameter.name
        _require(bool(name) and name not in seen, f"two parameters are named {name!r}" if name else "a name is empty")
        seen.add(name)
        _require(parameter.group in GROUPS, f"parameter {name!r} has the unknown group {parameter.group!r}")
        limits = (parameter.minimum, parameter.default, parameter.maximum)
        _require(all(math.isfinite(x) for x in limits), f"parameter {name!r} has limits that are not finite")
        _require(
            limits[0] <= limits[1] <= limits[2] and limits[0] < limits[2],
            f"parameter {name!r} has minimum, default and maximum out of order",
        )
        for shape in (parameter.shape, parameter.negative_shape):
            _require(shape is None or 0 <= shape < shapes, f"parameter {name!r} names a missing shape")
        _require(
            parameter.shape is not None or parameter.negative_shape is None,
            f"parameter {name!r} has a negative shape but no shape",
        )
    _require(math.isfinite(spec.metres_per_unit) and spec.metres_per_unit > 0, "metres_per_unit is not above 0")
    end = 0
    for mesh in spec.meshes:
        _require(mesh.vertex_start == end and mesh.vertex_count >= 0, "the vertex ranges of the meshes have gaps")
        end += mesh.vertex_count
    _require(not spec.meshes or end == vertices, "the vertex ranges of the meshes do not cover all vertices")
    if spec.landmarks is not None:
        _check_landmarks(spec.landmarks, faces)


def _check_landmarks(landmarks: LandmarkEmbedding, faces: int) -> None:
    for name, (dtype, shape) in _LANDMARKS.items():
        _check_array(name, getattr(landmarks, name.removeprefix("landmark_")), dtype, shape)
    triangle = landmarks.triangle
    _require(triangle.min() >= -1 and triangle.max() < faces, "a landmark names a missing triangle")
    weights = landmarks.barycentric[triangle >= 0]
    _require(
        bool((weights >= -1e-4).all() and (np.abs(weights.sum(axis=1) - 1) < 1e-3).all()),
        "the barycentric weights of a landmark are not a point of its triangle",
    )
    confidence = landmarks.confidence
    _require(bool((confidence >= 0).all() and (confidence <= 1).all()), "a landmark confidence is outside 0…1")


# --- JSON -------------------------------------------------------------------------------------------------------------


def _without_defaults(item: Any, always: Iterable[str]) -> dict[str, Any]:
    return {
        f.name: getattr(item, f.name)
        for f in fields(item)
        if f.name in always or getattr(item, f.name) not in (f.default, None)
    }


def _to_json(spec: RigSpec) -> str:
    parameters = [
        {
            "name": p.name,
            "group": p.group,
            "minimum": float(p.minimum),
            "maximum": float(p.maximum),
            "default": float(p.default),
            "shape": p.shape,
            "negative_shape": p.negative_shape,
            "sources": [
                _without_defaults(s, ("kind", "object", "key", "sign") if s.kind == "shape_key" else ("kind", "object"))
                for s in p.sources
            ],
        }
        for p in spec.parameters
    ]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "rig_hash": spec.rig_hash,
        "blender_version": spec.blender_version,
        "source": spec.source,
        "metres_per_unit": float(spec.metres_per_unit),
        "parts": list(spec.parts),
        "meshes": [_without_defaults(m, ("object", "vertex_start", "vertex_count")) for m in spec.meshes],
        "parameters": parameters,
        "left_out": [{"name": item.name, "reason": item.reason} for item in spec.left_out],
        "linear": spec.linear,
        "warnings": list(spec.warnings),
    }
    if spec.detector_json is not None:
        document["detector"] = dict(spec.detector_json)
    # ASCII: Blender 4.x cuts names inside a character, and a lone surrogate has no UTF-8 form.
    return json.dumps(document, ensure_ascii=True, allow_nan=False)


_MISSING = object()


def _get(item: Mapping[str, Any], key: str, kinds: tuple[type, ...], where: str, default: Any = _MISSING) -> Any:
    value = item.get(key, default)
    _require(value is not _MISSING, f"{where} has no {key!r}")
    if value is default:
        return value
    right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    _require(right, f"{key!r} of {where} has the wrong type")
    if float in kinds:
        try:
            return float(value)
        except OverflowError:
            raise _BadSpecError(f"{key!r} of {where} is too large") from None
    return value


def _items(document: Mapping[str, Any], key: str, default: Any = _MISSING) -> list[Mapping[str, Any]]:
    items = _get(document, key, (list,), "its JSON", default)
    _require(all(isinstance(item, dict) for item in items), f"{key!r} of its JSON does not hold objects")
    return items


def _strings(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    items = _get(document, key, (list,), "its JSON", [])
    _require(all(isinstance(item, str) for item in items), f"{key!r} of its JSON does not hold texts")
    return tuple(items)


def _parse_source(item: Any, where: str) -> Source:
    _require(isinstance(item, dict), f"a source of {where} is not an object")
    kind = _get(item, "kind", (str,), where)
    _require(kind in ("shape_key", "property"), f"{where} has a source of the unknown kind {kind!r}")
    sign = _get(item, "sign", (int,), where, 1)
    _require(sign in (1, -1), f"{where} has a source whose sign is neither 1 nor -1")
    return Source(
        kind=kind,
        object=_get(item, "object", (str,), where),
        key=_get(item, "key", (str,), where) if kind == "shape_key" else None,
        property=_get(item, "property", (str,), where) if kind == "property" else None,
        sign=sign,
        maximum=_get(item, "maximum", (int, float), where, None),
        bone=_get(item, "bone", (str,), where, None),
    )


def _parse_parameter(item: Mapping[str, Any]) -> Parameter:
    name = _get(item, "name", (str,), "a parameter")
    where = f"parameter {name!r}"
    return Parameter(
        name=name,
        group=_get(item, "group", (str,), where),
        minimum=_get(item, "minimum", (int, float), where),
        maximum=_get(item, "maximum", (int, float), where),
        default=_get(item, "default", (int, float), where),
        shape=_get(item, "shape", (int,), where, None),
        negative_shape=_get(item, "negative_shape", (int,), where, None),
        sources=tuple(_parse_source(s, where) for s in _get(item, "sources", (list,), where, [])),
    )


def _from_json(arrays: dict[str, np.ndarray], text: bytes) -> RigSpec:
    try:
        document = json.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise _BadSpecError("its JSON text cannot be parsed") from None
    _require(isinstance(document, dict), "its JSON text is not an object")
    schema = document.get("schema")
    _require(schema == SCHEMA, f"its schema is {schema!r}, this version of rigfit reads {SCHEMA!r}")
    parts = _strings(document, "parts")
    landmarks = None
    if any(name in arrays for name in _LANDMARKS):
        for name in _LANDMARKS:
            _require(name in arrays, f"array {name} is missing")
        landmarks = LandmarkEmbedding(**{name.removeprefix("landmark_"): arrays[name] for name in _LANDMARKS})
    return RigSpec(
        **{name: arrays[name] for name in _REQUIRED},
        parameters=tuple(_parse_parameter(item) for item in _items(document, "parameters")),
        parts=parts or PARTS,
        meshes=tuple(
            MeshRange(
                object=_get(item, "object", (str,), "a mesh"),
                vertex_start=_get(item, "vertex_start", (int,), "a mesh"),
                vertex_count=_get(item, "vertex_count", (int,), "a mesh"),
                control_vertices=_get(item, "control_vertices", (int,), "a mesh", -1),
            )
            for item in _items(document, "meshes", [])
        ),
        left_out=tuple(
            LeftOut(_get(item, "name", (str,), "left_out"), _get(item, "reason", (str,), "left_out"))
            for item in _items(document, "left_out", [])
        ),
        linear=_get(document, "linear", (bool,), "its JSON", True),
        warnings=_strings(document, "warnings"),
        rig_hash=_get(document, "rig_hash", (str,), "its JSON"),
        blender_version=_get(document, "blender_version", (str,), "its JSON", ""),
        source=_get(document, "source", (str,), "its JSON", ""),
        metres_per_unit=_get(document, "metres_per_unit", (int, float), "its JSON", 1.0),
        landmarks=landmarks,
        detector={
            name.removeprefix(_DETECTOR_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(_DETECTOR_PREFIX)
        },
        detector_json=_get(document, "detector", (dict,), "its JSON", None),
    )


# --- the zip archive --------------------------------------------------------------------------------------------------


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream)
    if version == (2, 0):
        return npy.read_array_header_2_0(stream)
    raise ValueError("unknown .npy version")


def _read_archive(path: Path, stream: IO[bytes]) -> tuple[dict[str, np.ndarray], bytes]:
    """Arrays by name and the JSON text. Every header is checked against the limits before its data is read."""
    arrays: dict[str, np.ndarray] = {}
    text: bytes | None = None
    total = 0
    wanted = _REQUIRED | _LANDMARKS
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name != "json" and name not in wanted and not name.startswith(_DETECTOR_PREFIX):
                    continue
                with archive.open(info) as member:
                    shape, _, dtype = _read_header(member)
                if dtype.hasobject:
                    raise _refuse(path, f"array {name} is a pickle, which is never read")
                size = math.prod(shape) * dtype.itemsize
                total += size
                if name == "json" and size > MAX_JSON_BYTES:
                    raise _refuse(path, "its JSON text is too large")
                if total > MAX_TOTAL_BYTES:
                    raise _refuse(path, f"it unpacks to more than {MAX_TOTAL_BYTES >> 30} GiB")
                if name in wanted and dtype != np.dtype(wanted[name][0]):
                    raise _refuse(path, f"array {name} is {dtype}, not {wanted[name][0]}")
                with archive.open(info) as member:
                    array = npy.read_array(member, allow_pickle=False)
                    member.read(1)  # reaching the end makes zipfile compare the checksum
                if name == "json":
                    text = array.tobytes()
                else:
                    arrays[name] = array
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, MemoryError) as error:
        reason = (
            "it holds more than fits in memory" if isinstance(error, MemoryError) else "it is damaged or no .npz file"
        )
        raise _refuse(path, reason) from None
    except Exception as error:
        if type(error).__module__ in ("zlib", "lzma"):
            raise _refuse(path, "it is damaged") from None
        raise
    if text is None:
        raise _refuse(path, "its JSON text is missing")
    for name in _REQUIRED:
        if name not in arrays:
            raise _refuse(path, f"array {name} is missing")
    return arrays, text


def _write_archive(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for key, array in arrays.items():
            # A fixed date: the same spec gives the same bytes.
            info = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_STORED if array.nbytes > _STORE_BYTES else zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=array.nbytes > 1 << 30) as member:
                npy.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
