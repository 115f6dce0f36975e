# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the rig spec of the open file: evaluated geometry, exact shape deltas, parameters.

Shape keys are linear (v = basis + Σ value · weight · (key − its relative key), Blender manual, "Relative Shape Keys"),
and so are an armature in a given pose, subdivision and mirror. Where nothing but shape keys and bones moves an object,
its deltas are read from the keys at once; where other modifiers or drivers take part, Blender evaluates each parameter.
Both are compared with Blender's own mesh for random mixes, and what is not linear is said.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import bpy
import numpy as np
from numpy.lib import format as npy

from ..compat import text
from ..messages import RigError
from .checks import require, why_not_readable, why_not_writable
from .drivers import KeyInput, PropertyInput, all_inputs, describe, driven_keys, inputs
from .names import PARTS, part_of
from .parameters import SCHEMA, Discovery, Parameter, discover, key_blocks, resolve_objects, rig_notes, set_key_value
from .steps import run_through

PART_ATTRIBUTE = "rigfit_part"
Progress = Callable[[int, int, str], None]

# Modifiers that leave vertex positions and topology alone.
_HARMLESS = {
    "DATA_TRANSFER",
    "NORMAL_EDIT",
    "UV_PROJECT",
    "UV_WARP",
    "VERTEX_WEIGHT_EDIT",
    "VERTEX_WEIGHT_MIX",
    "VERTEX_WEIGHT_PROXIMITY",
    "WEIGHTED_NORMAL",
}
# A row of a shape that moves less than this fraction of the rig's size is float noise.
_NOISE = 2e-7
# Closer than this fraction of the rig's size (10 µm on a head) counts as linear.
_LINEAR = 5e-5
_POSE_ENERGY = 0.95
_MIXES = 3
_STORE_BYTES = 24 << 20

_STEP_BYTES = 4 << 20

Rows = tuple[np.ndarray, np.ndarray]
Step = tuple[int, int, str]


@dataclass
class _Mesh:
    """One object of the rig while it is exported.

    neutral: (n,3) metres. linear: (3,3), row vectors in object space → world metres. direct: deltas come from the key
    data. turns: (n,3,3), what an armature does to a delta of each vertex. listens_to: meshes whose keys may move a mesh
    that is not direct; None: perhaps all.
    """

    object: bpy.types.Object
    start: int = 0
    neutral: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    linear: np.ndarray = field(default_factory=lambda: np.eye(3))
    direct: bool = False
    turns: np.ndarray | None = None
    listens_to: set[bpy.types.Mesh] | None = None

    @property
    def count(self) -> int:
        return len(self.neutral)


class _TopologyChangedError(Exception):
    """An evaluation has another number of vertices than the neutral."""


def export_rig(
    out: str,
    objects: Sequence[str] | None = None,
    pairs: bool = True,
    progress: Progress | None = None,
    *,
    merge_sides: bool = False,
) -> dict[str, Any]:
    """Write the rig spec (docs/architecture.md) of mesh objects to the file `out`.

    objects: names; None: the selected meshes, else all visible ones with shape keys. pairs, merge_sides: see
    `parameters.discover`. progress: called with (done, total, text). Geometry is what the viewport shows: subdivision
    at its viewport level, an armature in its present pose. The artist's values, flags and modes are as before
    afterwards, also after an error. Returns {"vertices", "triangles", "parameters", "left_out", "warnings", "linear",
    "rig_hash"}. Raises RigError.
    """
    steps = export_steps(out, objects, pairs, merge_sides=merge_sides)
    loan: _Loan = next(steps)  # type: ignore[assignment]
    # Held all the way, so that the steps do not give the rig back to the artist between two evaluations.
    with loan.taken():
        return run_through(steps, None if progress is None else lambda step: progress(*step))


def export_steps(
    out: str,
    objects: Sequence[str] | None = None,
    pairs: bool = True,
    *,
    merge_sides: bool = False,
    scratch: bool = False,
) -> Generator[Any, None, dict[str, Any]]:
    """`export_rig` in small steps, for a window that must not wait: the artist may work between two of them.

    Yields the loan of the rig first, then (done, total, text); returns what `export_rig` returns. Between two steps the
    artist's values are as they were, unless the caller holds the loan. scratch: the file is for another process of this
    session only: nothing is deflated, the disk is not waited for, and a rig that was compared with Blender's mesh earlier
    in the session is not compared again. Raises RigError; kind target_changed when the
    meshes or their keys are not the same as before the pause. Closing the generator leaves no file.
    """
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise RigError("file_unwritable", path=out, reason="its folder is missing or closed")
    chosen = resolve_objects(objects)
    for obj in chosen:
        require(why_not_readable(obj))
    found = discover(chosen, pairs, merge_sides)
    if not any(parameter.group != "appearance" for parameter in found.parameters):
        where = ", ".join(text(obj) for obj in chosen)
        if found.left_out:
            raise RigError(
                "no_parameters", objects=where, reason="; ".join(f"{n} is {r}" for n, r in found.left_out[:3])
            )
        raise RigError("no_shape_keys", objects=where)
    for obj in chosen:
        for reason in why_not_writable(obj, bool(key_blocks(obj)), chosen):
            found.warnings.append("A fit cannot be applied as it is: " + reason.error().message)
    rig = _Rig(found)
    loan = _Loan(rig)
    yield loan
    document, arrays = yield from _export(rig, loan, found, trusting=scratch)
    arrays = {"json": np.frombuffer(json.dumps(document, ensure_ascii=True).encode("ascii"), np.uint8), **arrays}
    for _ in npz_steps(out, arrays, scratch=scratch):
        yield len(rig.moving), len(rig.moving), "Writing the rig"
    return {
        "vertices": len(arrays["neutral"]),
        "triangles": len(arrays["triangles"]),
        "parameters": len(document["parameters"]),
        "left_out": document["left_out"],
        "warnings": document["warnings"],
        "linear": document["linear"],
        "rig_hash": document["rig_hash"],
    }


# --- the artist's state -----------------------------------------------------------------------------------------------


@contextmanager
def preserved(objects: Sequence[bpy.types.Object], parameters: Sequence[Parameter] = ()) -> Iterator[None]:
    """Put key values, mute flags, the custom properties of the parameters and modifier visibility back at the end."""
    keys = {obj.data.shape_keys for obj in objects if obj.data.shape_keys is not None}
    blocks = [(block, block.value, block.mute) for key in keys for block in key.key_blocks]
    shown = [(modifier, modifier.show_viewport) for obj in objects for modifier in obj.modifiers]
    held = []
    for parameter in parameters:
        for item in _property_inputs(parameter):
            held.append((item, item.owner[item.property]))
    try:
        yield
    finally:
        for block, value, mute in blocks:
            if block.value != value:
                set_key_value(block, value)
            if block.mute != mute:
                block.mute = mute
        for modifier, visible in shown:
            if modifier.show_viewport != visible:
                modifier.show_viewport = visible
        for item, value in held:
            if item.owner[item.property] != value:
                item.owner[item.property] = value
                item.object.update_tag()
        bpy.context.view_layer.update()


class _Loan:
    """The rig at the defaults of its parameters for as long as somebody looks at it; otherwise it is the artist's."""

    def __init__(self, rig: _Rig) -> None:
        self._rig = rig
        self._depth = 0
        self._signature = rig.signature()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Every parameter at its default, all keys unmuted, evaluated; put back at the outermost end. May be nested."""
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self.check()
        with preserved(self._rig.objects, self._rig.parameters):
            self._rig.reset()
            bpy.context.view_layer.update()
            self._depth = 1
            try:
                yield
            finally:
                self._depth = 0

    def check(self) -> None:
        """Are the meshes and keys those that we hold references to? RigError target_changed.

        A reference to a key that was removed would crash Blender, so only fresh ones are looked at.
        """
        if self._depth == 0 and self._rig.signature() != self._signature:
            raise RigError("target_changed", objects=", ".join(self._rig.names))


def _property_inputs(parameter: Parameter) -> list[PropertyInput]:
    scene = bpy.context.scene.objects
    return [
        PropertyInput(scene[source.object], source.property or "", source.bone)
        for source in parameter.sources
        if source.kind == "property" and source.object in scene
    ]


# --- evaluation -------------------------------------------------------------------------------------------------------


class _Rig:
    """The rig's objects as Blender evaluates them, and the setters of its parameters."""

    def __init__(self, found: Discovery) -> None:
        self.objects = found.objects
        self.names = [text(obj) for obj in found.objects]
        self.parameters = found.parameters
        self.meshes = [_Mesh(obj) for obj in found.objects]
        units = bpy.context.scene.unit_settings
        # With the unit system "None" Blender ignores the scale, too.
        self.scale = 1.0 if units.system == "NONE" else float(units.scale_length)
        self.moving = [p for p in found.parameters if p.group != "appearance"]
        by_object = {text(obj): key_blocks(obj) for obj in found.objects}
        self.blocks = {
            parameter.name: [
                (source, by_object[source.object][source.key])
                for source in parameter.sources
                if source.kind == "shape_key" and source.key is not None
            ]
            for parameter in found.parameters
        }
        self.data = {text(obj): obj.data for obj in found.objects}

    def signature(self) -> list[tuple]:
        """What must stay the same while references are held: where the objects, meshes and keys lie in memory."""
        here = {text(obj): obj for obj in bpy.context.scene.objects}
        signature: list[tuple] = []
        for name in self.names:
            obj = here.get(name)
            if obj is None or obj.type != "MESH":
                signature.append((name,))
                continue
            keys = obj.data.shape_keys
            blocks = [] if keys is None else [block.as_pointer() for block in keys.key_blocks]
            signature.append((name, obj.as_pointer(), obj.data.as_pointer(), len(obj.data.vertices), obj.mode, blocks))
        return signature

    def put(self, parameter: Parameter, value: float) -> None:
        for source, block in self.blocks[parameter.name]:
            wanted = parameter.source_value(source, value)
            if block.value != wanted:
                block.value = wanted
        for item in _property_inputs(parameter):
            item.owner[item.property] = float(value)
            item.object.update_tag()

    def reset(self) -> None:
        for parameter in self.moving:
            for _, block in self.blocks[parameter.name]:
                if block.mute:
                    block.mute = False
            self.put(parameter, parameter.default)

    def evaluated(self, mesh: _Mesh) -> bpy.types.Object:
        return mesh.object.evaluated_get(bpy.context.evaluated_depsgraph_get())

    def vertices(self, mesh: _Mesh) -> np.ndarray:
        """(n,3) float64 metres of one object as it is now. Raises _TopologyChangedError."""
        evaluated = self.evaluated(mesh)
        try:
            data = evaluated.to_mesh()
            local = np.empty((len(data.vertices), 3), np.float32)
            data.vertices.foreach_get("co", local.reshape(-1))
        finally:
            evaluated.to_mesh_clear()
        if mesh.count and len(local) != mesh.count:
            raise _TopologyChangedError
        matrix = np.array(evaluated.matrix_world, np.float64)
        return (local.astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]) * self.scale

    def moved_meshes(self, parameter: Parameter) -> set[bpy.types.Mesh]:
        return {self.data[source.object] for source in parameter.sources if source.kind == "shape_key"}


def _read_neutral(rig: _Rig) -> dict[str, np.ndarray]:
    """Neutral geometry of all objects: fills rig.meshes, returns the arrays of the spec."""
    triangles, uvs, parts = [], [], []
    start = 0
    largest = max(rig.meshes, key=lambda mesh: len(mesh.object.data.vertices))
    for mesh in rig.meshes:
        mesh.neutral = np.zeros((0, 3))
        mesh.neutral = rig.vertices(mesh)
        mesh.start = start
        start += mesh.count
        evaluated = rig.evaluated(mesh)
        mesh.linear = np.array(evaluated.matrix_world, np.float64)[:3, :3].T * rig.scale
        mesh.direct = _is_direct(mesh)
        mesh.listens_to = None if mesh.direct else _listens_to(mesh, rig)
        try:
            data = evaluated.to_mesh()
            corner, uv, part = _surface(mesh.object, data, default="skin" if mesh is largest else "other")
        finally:
            evaluated.to_mesh_clear()
        if np.linalg.det(mesh.linear) < 0:  # a mirrored object shows its triangles from behind
            corner, uv = corner[:, ::-1], uv[:, ::-1]
        triangles.append(corner + mesh.start)
        uvs.append(uv)
        parts.append(part)
    arrays = {
        "neutral": np.concatenate([mesh.neutral for mesh in rig.meshes]).astype(np.float32),
        "triangles": np.ascontiguousarray(np.concatenate(triangles), np.int32),
        "uv": np.ascontiguousarray(np.concatenate(uvs), np.float32),
        "part": np.concatenate(parts).astype(np.uint8),
    }
    if not len(arrays["triangles"]):
        raise RigError("no_geometry", objects=", ".join(text(mesh.object) for mesh in rig.meshes))
    # Last, because the temporary objects have the depsgraph built anew.
    for mesh in rig.meshes:
        if mesh.direct and _shaping(mesh.object) and key_blocks(mesh.object):
            mesh.turns = _measure_turns(mesh)
    return arrays


def _surface(obj: bpy.types.Object, data: bpy.types.Mesh, default: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Triangles (F,3), uv (F,3,2), part (F,) of an evaluated mesh."""
    data.calc_loop_triangles()
    count = len(data.loop_triangles)
    corners, loops = np.empty((count, 3), np.int32), np.empty((count, 3), np.int32)
    material, polygon = np.empty(count, np.int32), np.empty(count, np.int32)
    data.loop_triangles.foreach_get("vertices", corners.reshape(-1))
    data.loop_triangles.foreach_get("loops", loops.reshape(-1))
    data.loop_triangles.foreach_get("material_index", material)
    data.loop_triangles.foreach_get("polygon_index", polygon)
    layer = next((layer for layer in data.uv_layers if layer.active_render), None)
    if layer is None:
        uv = np.zeros((count, 3, 2), np.float32)
    else:
        flat = np.empty((len(data.loops), 2), np.float32)
        layer.uv.foreach_get("vector", flat.reshape(-1))
        uv = flat[loops]
    attribute = data.attributes.get(PART_ATTRIBUTE)
    if attribute is not None and attribute.domain == "FACE" and attribute.data_type in ("INT", "INT8"):
        values = np.empty(len(data.polygons), np.int32)
        attribute.data.foreach_get("value", values)
        part = values[polygon]
        part[(part < 0) | (part >= len(PARTS))] = PARTS.index("other")
        return corners, uv, part
    named = rig_notes(obj).get("parts", {})
    own = part_of(text(obj))
    table = []
    for slot in obj.material_slots:
        name = "" if slot.material is None else text(slot.material)
        from_material = part_of(name)
        # An atlas named "Face" on an object named "Eyes" is an eye.
        specific = from_material if from_material not in (None, "skin") else own if own != "skin" else None
        table.append(PARTS.index(named.get(name) or specific or from_material or own or default))
    table = table or [PARTS.index(own or default)]
    return corners, uv, np.array(table)[np.clip(material, 0, len(table) - 1)]


def _is_direct(mesh: _Mesh) -> bool:
    """Does nothing but shape keys and bones move the object's vertices, one to one?

    Bone envelopes are out: their weights depend on where a vertex is.
    """
    obj = mesh.object
    return (
        len(obj.data.vertices) == mesh.count
        and (obj.parent is None or obj.parent_type not in ("ARMATURE", "LATTICE", "CURVE"))
        and all(
            modifier.type == "ARMATURE" and modifier.use_vertex_groups and not modifier.use_bone_envelopes
            for modifier in _shaping(obj)
        )
    )


def _shaping(obj: bpy.types.Object) -> list[bpy.types.Modifier]:
    return [modifier for modifier in obj.modifiers if modifier.show_viewport and modifier.type not in _HARMLESS]


def _measure_turns(mesh: _Mesh) -> np.ndarray:
    """(n,3,3) float32: how the object's armatures turn and stretch a displacement of each vertex.

    Skinning with weights that do not depend on the position is affine for each vertex (linear blend and dual
    quaternion alike), so three moved copies of the mesh tell all of it. They are a temporary object.
    """
    obj, count = mesh.object, mesh.count
    data = obj.data.copy()
    probe = obj.copy()
    try:
        probe.data = data
        copied = data.shape_keys
        if copied is not None:
            probe.shape_key_clear()
            bpy.data.batch_remove([copied])
        bpy.context.scene.collection.objects.link(probe)
        base = np.empty((count, 3), np.float32)
        data.vertices.foreach_get("co", base.reshape(-1))
        reach = max(float(np.abs(base).max(initial=0)), 1e-3)
        seen = []
        for axis in (None, 0, 1, 2):
            moved = base.copy()
            if axis is not None:
                moved[:, axis] += np.float32(reach)
            data.vertices.foreach_set("co", moved.reshape(-1))
            data.update()
            bpy.context.view_layer.update()
            evaluated = probe.evaluated_get(bpy.context.evaluated_depsgraph_get())
            result = np.empty((count, 3), np.float32)
            try:
                evaluated.to_mesh().vertices.foreach_get("co", result.reshape(-1))
            finally:
                evaluated.to_mesh_clear()
            seen.append(result.astype(np.float64))
        return np.stack([(seen[1 + axis] - seen[0]) / reach for axis in range(3)], axis=2).astype(np.float32)
    finally:
        bpy.data.objects.remove(probe)
        bpy.data.meshes.remove(data)


def _listens_to(mesh: _Mesh, rig: _Rig) -> set[bpy.types.Mesh] | None:
    """Meshes whose keys can move the object: its own and those its modifiers point at; None: perhaps all."""
    obj = mesh.object
    found = {obj.data}
    if obj.parent is not None and obj.parent_type in ("LATTICE", "CURVE", "VERTEX", "VERTEX_3"):
        return None
    for modifier in obj.modifiers:
        if not modifier.show_viewport or modifier.type == "ARMATURE":
            continue
        if modifier.type == "NODES":
            return None
        for prop in modifier.bl_rna.properties:
            target = getattr(modifier, prop.identifier, None) if prop.type == "POINTER" else None
            if isinstance(target, bpy.types.Collection) or (
                isinstance(target, bpy.types.Object) and target.type != "MESH" and target.type != "EMPTY"
            ):
                return None
            if isinstance(target, bpy.types.Object) and target.type == "MESH":
                found.add(target.data)
    return found


# --- shapes -----------------------------------------------------------------------------------------------------------


class _KeyReader:
    """Deltas of shape keys in object space, straight from the key data."""

    def __init__(self) -> None:
        self._weights: dict[tuple[str, str], np.ndarray | None] = {}
        self._cached: tuple[bpy.types.ShapeKey, np.ndarray] | None = None

    def delta(self, obj: bpy.types.Object, block: bpy.types.ShapeKey) -> np.ndarray | None:
        """(n,3) float32; None if Blender ignores the key because its size is not the mesh's."""
        own = self._points(block)
        if len(own) != len(obj.data.vertices):
            return None
        if self._cached is None or self._cached[0] != block.relative_key:
            self._cached = (block.relative_key, self._points(block.relative_key))
        delta = own - self._cached[1]
        group = text(block, "vertex_group")
        if group:
            weights = self._group(obj, group)
            if weights is not None:
                delta *= weights[:, None]
        return delta

    @staticmethod
    def _points(block: bpy.types.ShapeKey) -> np.ndarray:
        points = np.empty((len(block.points), 3), np.float32)
        block.points.foreach_get("co", points.reshape(-1))
        return points

    def _group(self, obj: bpy.types.Object, name: str) -> np.ndarray | None:
        if (text(obj), name) not in self._weights:
            index = next((group.index for group in obj.vertex_groups if text(group) == name), None)
            weights = None
            if index is not None:  # a mask whose group is gone masks nothing
                weights = np.zeros(len(obj.data.vertices), np.float32)
                for vertex in obj.data.vertices:
                    for entry in vertex.groups:
                        if entry.group == index:
                            weights[vertex.index] = entry.weight
            self._weights[text(obj), name] = weights
        return self._weights[text(obj), name]


@dataclass
class _Shapes:
    """Deltas per unit by parameter name: above the default, and below it where that differs."""

    above: dict[str, Rows | None] = field(default_factory=dict)
    below: dict[str, Rows | None] = field(default_factory=dict)
    crooked: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


def _measured(rig: _Rig) -> set[str]:
    """Parameters that move more than their own keys: properties, and keys or properties that drivers read."""
    read_keys, read_properties = set(), set()
    for item in all_inputs():
        if isinstance(item, KeyInput):
            read_keys.add((item.keys, item.name))
        elif isinstance(item, PropertyInput):
            read_properties.add((text(item.object), item.property))
    found = set()
    for parameter in rig.moving:
        for source in parameter.sources:
            if source.kind == "property" or (rig.data[source.object].shape_keys, source.key) in read_keys:
                found.add(parameter.name)
    return found


def _sparse(blocks: list[tuple[int, np.ndarray]], noise: float) -> Rows | None:
    """Rows of the concatenated dense blocks (start, (n,3)) that move; None if none does."""
    ids, deltas = [], []
    for start, delta in sorted(blocks, key=lambda block: block[0]):
        keep = _moving_rows(np.abs(delta) > noise)
        if len(keep):
            ids.append((keep + start).astype(np.int32))
            deltas.append((delta if len(keep) == len(delta) else delta[keep]).astype(np.float32, copy=False))
    return (np.concatenate(ids), np.concatenate(deltas)) if ids else None


def _moving_rows(mask: np.ndarray) -> np.ndarray:
    """Indices of the rows of a (n,3) mask that hold a True; column by column is 5 times as fast as any(axis=1)."""
    return np.flatnonzero(mask[:, 0] | mask[:, 1] | mask[:, 2])


def _add(target: np.ndarray, rows: Rows, amount: float) -> None:
    """target[ids] += amount · deltas, without a gather where the ids are a run."""
    ids, deltas = rows
    if len(ids):
        run = int(ids[-1]) - int(ids[0]) + 1 == len(ids)
        target[slice(int(ids[0]), int(ids[-1]) + 1) if run else ids] += amount * deltas


def _collect(rig: _Rig, loan: _Loan, measured: set[str], size: float) -> Generator[Step, None, _Shapes]:
    """All shapes, a parameter a step."""
    shapes, reader = _Shapes(), _KeyReader()
    noise = _NOISE * size

    def evaluate(parameter: Parameter, value: float, meshes: list[_Mesh]) -> list[tuple[int, np.ndarray]]:
        with loan.taken():
            rig.put(parameter, value)
            bpy.context.view_layer.update()
            try:
                return [(mesh.start, rig.vertices(mesh) - mesh.neutral) for mesh in meshes]
            finally:
                rig.put(parameter, parameter.default)

    for done, parameter in enumerate(rig.moving):
        yield done, len(rig.moving), "Reading the rig"
        loan.check()
        name, moved = parameter.name, rig.moved_meshes(parameter)
        by_evaluation = [
            mesh
            for mesh in rig.meshes
            if name in measured or (not mesh.direct and (mesh.listens_to is None or mesh.listens_to & moved))
        ]
        ends = {1: parameter.maximum, -1: parameter.minimum}
        sides = [side for side in (1, -1) if ends[side] != parameter.default]
        if not parameter.signed_pair and name not in measured:
            sides = sides[:1]
        result: dict[int, list[tuple[int, np.ndarray]]] = {}
        try:
            for side in sides:
                dense = [
                    (mesh.start, delta)
                    for mesh in rig.meshes
                    if mesh not in by_evaluation and (delta := _direct(rig, reader, mesh, parameter, side)) is not None
                ]
                if by_evaluation:
                    reach = ends[side] - parameter.default
                    full = evaluate(parameter, ends[side], by_evaluation)
                    if name in measured:
                        half = evaluate(parameter, parameter.default + reach / 2, by_evaluation)
                        apart = max(np.abs(f[1] / 2 - h[1]).max(initial=0) for f, h in zip(full, half, strict=True))
                        if apart > 1e-4 * size and name not in shapes.crooked:
                            shapes.crooked.append(name)
                    dense += [(start, delta / reach) for start, delta in full]
                result[side] = dense
        except _TopologyChangedError:
            shapes.dropped[name] = "it changes the number of vertices (a modifier merges, cuts or remeshes)"
            continue
        first = sides[0]
        shapes.above[name] = _sparse(result[first], noise)
        if len(sides) == 2:
            below = _sparse(result[-1], noise)
            if parameter.signed_pair or not _same(shapes.above[name], below, 1e-5 * size):
                shapes.below[name] = (
                    below if below is not None else (np.zeros(0, np.int32), np.zeros((0, 3), np.float32))
                )
    return shapes


def _direct(rig: _Rig, reader: _KeyReader, mesh: _Mesh, parameter: Parameter, side: int) -> np.ndarray | None:
    """(n,3) metres per unit that the parameter's keys add to the object on one side of the default."""
    total = None
    for source, block in rig.blocks[parameter.name]:
        if rig.data[source.object] != mesh.object.data or (parameter.signed_pair and source.sign != side):
            continue
        delta = reader.delta(mesh.object, block)
        if delta is not None:
            if mesh.turns is not None:
                delta = np.einsum("nij,nj->ni", mesh.turns, delta)
            moved = delta @ (mesh.linear * source.sign).astype(np.float32)
            total = moved if total is None else total + moved
    return total


def _same(one: Rows | None, other: Rows | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    ids = np.union1d(one[0], other[0])
    dense = [np.zeros((len(ids), 3)), np.zeros((len(ids), 3))]
    for target, rows in zip(dense, (one, other), strict=True):
        target[np.searchsorted(ids, rows[0])] = rows[1]
    return bool(np.abs(dense[0] - dense[1]).max(initial=0) <= tolerance)


# --- comparison with Blender ------------------------------------------------------------------------------------------


def _mixes(rig: _Rig, shapes: _Shapes) -> list[dict[str, float]]:
    """Random values for about two thirds of the parameters, each in one mix at least; the same for every export."""
    random = np.random.default_rng(20240607)
    usable = [p for p in rig.moving if p.name not in shapes.dropped and p.name not in shapes.crooked]
    mixes: list[dict[str, float]] = [{} for _ in range(_MIXES)]
    for index, parameter in enumerate(usable):
        for number, mix in enumerate(mixes):
            if number == index % _MIXES or random.random() < 0.5:
                mix[parameter.name] = float(random.uniform(parameter.minimum, parameter.maximum))
    return mixes


def _mismatch(
    rig: _Rig,
    loan: _Loan,
    shapes: _Shapes,
    mixes: Sequence[Mapping[str, float]],
    size: float,
    muted: Sequence[bpy.types.ShapeKey] = (),
) -> Generator[Step, None, dict[str, float]]:
    """Largest distance in metres between spec and Blender for each object where it is above float noise; a mix a step."""
    worst: dict[str, float] = {}
    for mix in mixes:
        yield len(rig.moving), len(rig.moving), "Checking the shapes against Blender's mesh"
        with loan.taken(), _muted(muted):
            for name, apart in _apart(rig, shapes, mix, size).items():
                worst[name] = max(apart, worst.get(name, 0.0))
    return worst


def _apart(rig: _Rig, shapes: _Shapes, mix: Mapping[str, float], size: float) -> dict[str, float]:
    """`_mismatch` of one mix."""
    table = {parameter.name: parameter for parameter in rig.moving}
    worst: dict[str, float] = {}
    try:
        for name, value in mix.items():
            rig.put(table[name], value)
        bpy.context.view_layer.update()
        expected = np.concatenate([mesh.neutral for mesh in rig.meshes])
        travel = float(np.abs(expected).max(initial=0))
        for name, value in mix.items():
            # What Blender holds is a float32.
            offset = float(np.float32(value)) - table[name].default
            rows = shapes.below.get(name) if offset < 0 and name in shapes.below else shapes.above[name]
            if rows is not None:
                _add(expected, rows, offset)
        for mesh in rig.meshes:
            span = slice(mesh.start, mesh.start + mesh.count)
            # float32 sums inside Blender: the error grows with what is added up. Shapes that were read off evaluated
            # meshes each bring their own: subdivision adds up a fan of neighbours (9 µm on a pole of 200 quads).
            measured = 1.0 if mesh.direct else math.sqrt(1 + len(mix) / 8)
            tolerance = _LINEAR * size * measured + 5e-7 * math.sqrt(len(mix) + 1) * travel
            try:
                apart = float(np.abs(rig.vertices(mesh) - expected[span]).max(initial=0))
            except _TopologyChangedError:
                apart = math.inf
            if apart > tolerance:
                worst[text(mesh.object)] = apart
    finally:
        for name in mix:
            rig.put(table[name], table[name].default)
    return worst


@contextmanager
def _muted(blocks: Sequence[bpy.types.ShapeKey]) -> Iterator[None]:
    before = [block.mute for block in blocks]
    try:
        for block in blocks:
            block.mute = True
        yield
    finally:
        for block, mute in zip(blocks, before, strict=True):
            block.mute = mute


def _correctives(rig: _Rig) -> list[tuple[str, str, bpy.types.ShapeKey]]:
    """Driven keys that several things move together: (name, what drives it, key)."""
    found = []
    for keys in {mesh.object.data.shape_keys for mesh in rig.meshes} - {None}:
        for name, curve in driven_keys(keys).items():
            block = next((block for block in keys.key_blocks if text(block) == name), None)
            if block is not None and not block.mute and len(inputs(curve)) > 1:
                found.append((name, describe(curve), block))
    return sorted(found, key=lambda item: item[0])


def _bending_modifiers(rig: _Rig, mix: Mapping[str, float], size: float) -> list[str]:
    """Modifiers without which the mix would move its mesh in proportion."""
    table = {parameter.name: parameter for parameter in rig.moving}
    found = []

    def bend(mesh: _Mesh) -> float:
        steps = []
        for part in (0.0, 0.5, 1.0):
            for name, value in mix.items():
                default = table[name].default
                rig.put(table[name], default + part * (value - default))
            bpy.context.view_layer.update()
            count, mesh.neutral = mesh.neutral, np.zeros((0, 3))
            try:
                steps.append(rig.vertices(mesh))
            finally:
                mesh.neutral = count
        for name in mix:
            rig.put(table[name], table[name].default)
        if len({len(step) for step in steps}) > 1:
            return math.inf
        return float(np.abs(steps[1] - (steps[0] + steps[2]) / 2).max(initial=0))

    for mesh in rig.meshes:
        before = bend(mesh)
        if before <= 0.1 * _LINEAR * size:  # a second difference sees a fraction of the distance
            continue
        for modifier in mesh.object.modifiers:
            if not modifier.show_viewport:
                continue
            modifier.show_viewport = False
            after = bend(mesh)
            modifier.show_viewport = True
            if after < 0.1 * before:
                found.append(f"{text(modifier)} of {text(mesh.object)}")
    bpy.context.view_layer.update()
    return found


def _checked_shapes(
    rig: _Rig, loan: _Loan, found: Discovery, size: float, measured: set[str], shapes: _Shapes
) -> Generator[Step, None, tuple[_Shapes, bool]]:
    """Compare with Blender's mesh; the shapes (others, if need be) and whether the rig is linear; warnings say why not."""
    mixes = _mixes(rig, shapes)
    wrong = yield from _mismatch(rig, loan, shapes, mixes, size)
    linear = True
    correctives = _correctives(rig) if wrong else []
    muted = [block for _, _, block in correctives]
    if correctives:
        rest = yield from _mismatch(rig, loan, shapes, mixes, size, muted)
        if set(rest) != set(wrong) or not rest:
            for name, by, _ in correctives:
                found.warnings.append(f"The rig is not linear: the key {name} is {by}; fits leave it out of account")
            linear, wrong = False, rest
    if wrong:
        # Perhaps something unexpected takes part (a modifier that looks at other objects): let Blender evaluate all.
        again = False
        for mesh in rig.meshes:
            if text(mesh.object) in wrong:
                again |= mesh.direct or (mesh.listens_to is not None and len(rig.meshes) > 1)
                mesh.direct, mesh.turns, mesh.listens_to = False, None, None
        if again:
            shapes = yield from _collect(rig, loan, measured, size)
            mixes = _mixes(rig, shapes)
        wrong = yield from _mismatch(rig, loan, shapes, mixes, size, muted)
        culprits = []
        if wrong:
            with loan.taken(), _muted(muted):
                culprits = _bending_modifiers(rig, {k: v for mix in mixes for k, v in mix.items()}, size)
            linear = False
            worst = max(wrong, key=lambda name: wrong[name])
            by = "one of its modifiers or drivers" if not culprits else "its modifier " + ", ".join(culprits)
            amount = (
                "and changes its vertex count" if math.isinf(wrong[worst]) else f"by up to {1000 * wrong[worst]:.2g} mm"
            )
            found.warnings.append(
                f"The rig is not linear: {by} bends the shapes of {worst} {amount}; fits approximate it"
            )
    for name in shapes.crooked:
        linear = False
        found.warnings.append(f"The rig is not linear: {name} does not move the mesh in proportion to its value")
    return shapes, linear


# --- the document -----------------------------------------------------------------------------------------------------


def _similarity_basis(neutral: np.ndarray) -> np.ndarray:
    """(3V,7) orthonormal basis of the linearised similarities (shift, turn, scale) of the whole rig."""
    centred = neutral.astype(np.float64) - neutral.mean(axis=0, dtype=np.float64)
    columns = [np.tile(axis, (len(neutral), 1)) for axis in np.eye(3)]
    columns += [np.cross(axis, centred) for axis in np.eye(3)]
    columns.append(centred)
    return np.linalg.qr(np.stack([column.reshape(-1) for column in columns], axis=1))[0].astype(np.float32)


def _is_pose(basis: np.ndarray, rows: Rows | None) -> bool:
    """Is at least 95 % of the shape's energy a similarity of the whole rig?"""
    if rows is None or not len(rows[0]):
        return False
    ids, delta = rows
    if 2 * len(ids) < len(basis) // 3:  # fewer than half of the vertices: never the whole head
        return False
    dense = np.zeros((len(basis) // 3, 3), np.float32)
    dense[ids] = delta
    flat = dense.reshape(-1)
    explained = float(((flat @ basis).astype(np.float64) ** 2).sum())
    return explained >= _POSE_ENERGY * float((flat * flat).sum(dtype=np.float64))


# Rigs (hash and `_stage`) that Blender's mesh was compared with in this session and that are linear without a remark.
_proven: set[tuple[str, str]] = set()


def _stage(rig: _Rig) -> str:
    """What may bend shapes without showing in the rig hash: modifiers, parents, drivers."""
    about = [
        (
            text(mesh.object),
            [(modifier.type, text(modifier), modifier.show_viewport) for modifier in mesh.object.modifiers],
            mesh.object.parent_type if mesh.object.parent is not None else "",
        )
        for mesh in rig.meshes
    ]
    return repr((about, sum(1 for _ in all_inputs())))


def _export(
    rig: _Rig, loan: _Loan, found: Discovery, trusting: bool
) -> Generator[Step, None, tuple[dict[str, Any], dict[str, Any]]]:
    """trusting: a rig that was compared with Blender's mesh in this session is not compared again."""
    with loan.taken():
        arrays: dict[str, Any] = dict(_read_neutral(rig))
    neutral = arrays["neutral"]
    size = float(np.linalg.norm(neutral.max(axis=0).astype(np.float64) - neutral.min(axis=0)))
    measured = _measured(rig)
    shapes = yield from _collect(rig, loan, measured, size)
    entries, rows = yield from _sorted_shapes(rig, found, shapes, neutral)
    rig_hash = yield from _hash_steps(entries, arrays, rows)
    proof = (rig_hash, _stage(rig))
    linear = True
    if not (trusting and proof in _proven):
        warnings = len(found.warnings)
        checked, linear = yield from _checked_shapes(rig, loan, found, size, measured, shapes)
        if checked is not shapes:
            shapes = checked
            entries, rows = yield from _sorted_shapes(rig, found, shapes, neutral)
            rig_hash = yield from _hash_steps(entries, arrays, rows)
        elif linear and len(found.warnings) == warnings:
            _proven.add(proof)
    loan.check()
    arrays["shape_offsets"] = np.cumsum([0, *(len(ids) for ids, _ in rows)]).astype(np.int64)
    arrays["shape_vertices"] = [ids for ids, _ in rows] or np.zeros(0, np.int32)
    arrays["shape_deltas"] = [deltas for _, deltas in rows] or np.zeros((0, 3), np.float32)
    left_out = [*found.left_out, *shapes.dropped.items()]
    document = {
        "schema": SCHEMA,
        "rig_hash": rig_hash,
        "blender_version": ".".join(str(number) for number in bpy.app.version),
        "source": os.path.basename(bpy.data.filepath),
        "metres_per_unit": rig.scale,
        "parts": list(PARTS),
        "meshes": [
            {
                "object": text(mesh.object),
                "vertex_start": mesh.start,
                "vertex_count": mesh.count,
                "control_vertices": len(mesh.object.data.vertices),
            }
            for mesh in rig.meshes
        ],
        "parameters": entries,
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out],
        "linear": linear,
        "warnings": found.warnings,
    }
    return document, arrays


def _sorted_shapes(
    rig: _Rig, found: Discovery, shapes: _Shapes, neutral: np.ndarray
) -> Generator[Step, None, tuple[list[dict[str, Any]], list[Rows]]]:
    """The parameters as the document has them, and the rows of their shapes."""
    basis = _similarity_basis(neutral)
    entries: list[dict[str, Any]] = []
    rows: list[Rows] = []
    for parameter in found.parameters:
        if parameter.name in shapes.dropped:
            continue
        yield len(rig.moving), len(rig.moving), "Sorting the shapes"
        above, below = shapes.above.get(parameter.name), shapes.below.get(parameter.name)
        if above is None and below is not None:
            above = (np.zeros(0, np.int32), np.zeros((0, 3), np.float32))
        sides = [side for side in (above, below) if side is not None and len(side[0])]
        if parameter.group != "appearance" and sides and all(_is_pose(basis, side) for side in sides):
            parameter = replace(parameter, group="pose")
        numbers = []
        for side in (above, below):
            numbers.append(None if side is None else len(rows))
            if side is not None:
                rows.append(side)
        entries.append(_entry(parameter, *numbers))
    return entries, rows


def _entry(parameter: Parameter, shape: int | None, negative_shape: int | None) -> dict[str, Any]:
    sources = []
    for source in parameter.sources:
        entry: dict[str, Any] = {"kind": source.kind, "object": source.object}
        if source.kind == "shape_key":
            entry |= {"key": source.key, "sign": source.sign}
        else:
            entry |= {"property": source.property} | ({"bone": source.bone} if source.bone else {})
        sources.append(entry)
    return {
        "name": parameter.name,
        "group": parameter.group,
        "minimum": parameter.minimum,
        "maximum": parameter.maximum,
        "default": parameter.default,
        "shape": shape,
        "negative_shape": negative_shape,
        "sources": sources,
    }


def compute_rig_hash(parameters: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any], rows: Sequence[Rows]) -> str:
    """The twin of `rigfit.rig.spec.compute_rig_hash`; the add-on cannot import the backend. A test compares the two."""
    return run_through(_hash_steps(parameters, arrays, rows))


def _hash_steps(
    parameters: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any], rows: Sequence[Rows]
) -> Generator[Step, None, str]:
    neutral = arrays["neutral"]
    low, high = neutral.min(axis=0).astype(np.float64), neutral.max(axis=0).astype(np.float64)
    diagonal = float(np.sqrt(((high - low) ** 2).sum()))
    step = 2.0 ** math.floor(math.log2(1e-5 * diagonal)) if diagonal > 0 else 1.0
    digest = hashlib.sha256(b"rigfit.rig/1\n")
    table = [
        [p["name"], p["group"], *(f"{x + 0.0:.6g}" for x in (p["minimum"], p["maximum"], p["default"]))]
        for p in parameters
    ]
    digest.update(json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode("ascii"))
    digest.update(np.ascontiguousarray(arrays["triangles"], dtype="<i4").tobytes())
    digest.update(np.rint(neutral.astype(np.float64) / step).astype("<i8").tobytes())
    for parameter in parameters:
        yield len(parameters), len(parameters), "Sorting the shapes"
        for mark, shape in ((b"+", parameter["shape"]), (b"-", parameter["negative_shape"])):
            digest.update(mark)
            if shape is None:
                continue
            ids, deltas = rows[shape]
            # Exact in float32, since step is a power of two.
            steps = np.rint(deltas * np.float32(1 / step)).astype("<i4")
            keep = _moving_rows(steps != 0)
            digest.update(np.ascontiguousarray(ids[keep], dtype="<i4"))
            digest.update(np.ascontiguousarray(steps[keep]))
    return digest.hexdigest()


def write_npz(path: str, arrays: Mapping[str, np.ndarray | list[np.ndarray]]) -> None:
    """Write an .npz file: temporary name in the same folder, fsync, rename. A list is written as one array.

    Large arrays are stored, not deflated: float noise hardly shrinks and costs seconds. Raises RigError
    file_unwritable.
    """
    for _ in npz_steps(path, arrays):
        pass


def npz_steps(
    path: str, arrays: Mapping[str, np.ndarray | list[np.ndarray]], *, scratch: bool = False
) -> Generator[None, None, None]:
    """`write_npz` in steps of a few megabytes. scratch: store everything, and do not wait for the disk."""
    temporary = None
    try:
        folder, base = os.path.split(os.path.abspath(path))
        descriptor, temporary = tempfile.mkstemp(prefix=f".{base}.", suffix=".part", dir=folder)
        with os.fdopen(descriptor, "wb") as stream:
            with zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
                for name, array in arrays.items():
                    pieces = array if isinstance(array, list) else [array]
                    size = sum(piece.nbytes for piece in pieces)
                    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
                    info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                    stored = scratch or size > _STORE_BYTES
                    info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
                    with archive.open(info, "w", force_zip64=size > 1 << 30) as member:
                        header = {"descr": npy.dtype_to_descr(pieces[0].dtype), "fortran_order": False, "shape": shape}
                        npy.write_array_header_1_0(member, header)
                        waiting = 0
                        for piece in pieces:
                            member.write(np.ascontiguousarray(piece))
                            waiting += piece.nbytes
                            if waiting > _STEP_BYTES:
                                waiting = 0
                                yield
                    yield
            stream.flush()
            if not scratch:
                os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise RigError("file_unwritable", path=path, reason=error.strerror or str(error)) from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
