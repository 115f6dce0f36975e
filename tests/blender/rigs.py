# SPDX-License-Identifier: Apache-2.0
"""Small rigs that the tests make, and a slow, independent reading of Blender's evaluated mesh and of spec files."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import bpy
import numpy as np

RINGS, SEGMENTS = 10, 12


def head_data(size: float = 0.1, rings: int = RINGS, segments: int = SEGMENTS) -> tuple[np.ndarray, list]:
    """An ellipsoid of quads with two poles, asymmetric so that no mistake of an axis goes unseen."""
    points = [(0.0, 0.0, 1.3)]
    for i in range(1, rings):
        theta = math.pi * i / rings
        for j in range(segments):
            phi = 2 * math.pi * j / segments
            x, y = math.sin(theta) * math.sin(phi), -math.sin(theta) * math.cos(phi)
            points.append((x, y * (1.2 if y < 0 else 1.0), 1.3 * math.cos(theta)))
    points.append((0.0, 0.0, -1.3))
    last, faces = len(points) - 1, []
    for j in range(segments):
        k = (j + 1) % segments
        faces.append((0, 1 + j, 1 + k))
        for i in range(rings - 2):
            a, b = 1 + i * segments + j, 1 + i * segments + k
            faces.append((a, a + segments, b + segments, b))
        low = 1 + (rings - 2) * segments
        faces.append((last, low + k, low + j))
    return np.array(points, np.float32) * np.float32(size), faces


def add_mesh(
    name: str, points: np.ndarray, faces: Sequence, parent: bpy.types.Object | None = None
) -> bpy.types.Object:
    """A mesh object in the scene's collection, without keys."""
    mesh = bpy.data.meshes.new(name)
    mesh.from_pydata(np.asarray(points).tolist(), [], faces)
    obj = bpy.data.objects.new(name, mesh)
    bpy.context.scene.collection.objects.link(obj)
    obj.parent = parent
    return obj


def bump(points: np.ndarray, name: str, size: float = 0.1) -> np.ndarray:
    """(n,3) float32 local displacement that depends on the name only."""
    random = np.random.RandomState(zlib.crc32(name.encode("utf-8", "surrogateescape")))
    centre = points[random.randint(len(points))]
    direction = random.uniform(-0.3, 0.3, 3) * size
    weight = np.clip(1 - np.linalg.norm(points - centre, axis=1) / (0.9 * size), 0, None) ** 2
    return (weight[:, None] * direction).astype(np.float32)


def add_key(
    obj: bpy.types.Object,
    name: str,
    delta: np.ndarray | None = None,
    low: float = 0.0,
    high: float = 1.0,
    value: float = 0.0,
) -> bpy.types.ShapeKey:
    """A shape key that moves the basis by `delta`; without one by `bump`."""
    if obj.data.shape_keys is None:
        obj.shape_key_add(name="Basis")
    key = obj.shape_key_add(name=name, from_mix=False)
    base = np.array([point.co for point in obj.data.shape_keys.reference_key.data], np.float32)
    moved = base + (bump(base, name) if delta is None else delta)
    key.data.foreach_set("co", np.ascontiguousarray(moved, np.float32).reshape(-1))
    key.slider_min, key.slider_max = low, high
    key.value = value  # Blender 5 starts a new key at 1
    return key


def add_head(
    name: str = "Head", keys: Sequence[str] = ("jawOpen", "nose-size", "cheek-out", "cheek-in")
) -> bpy.types.Object:
    """The ellipsoid with a key for each name."""
    obj = add_mesh(name, *head_data())
    for key in keys:
        add_key(obj, key)
    return obj


def add_armature(obj: bpy.types.Object) -> bpy.types.Object:
    """Two posed bones that bend the object; weights run from one to the other along Z."""
    armature = bpy.data.objects.new("Armature", bpy.data.armatures.new("Armature"))
    bpy.context.scene.collection.objects.link(armature)
    bpy.context.view_layer.objects.active = armature
    bpy.ops.object.mode_set(mode="EDIT")
    for name, z in (("low", -0.13), ("high", 0.0)):
        bone = armature.data.edit_bones.new(name)
        bone.head, bone.tail = (0, 0, z), (0, 0, z + 0.13)
    bpy.ops.object.mode_set(mode="OBJECT")
    low, high = obj.vertex_groups.new(name="low"), obj.vertex_groups.new(name="high")
    for vertex in obj.data.vertices:
        share = min(max(vertex.co.z / 0.26 + 0.5, 0.0), 1.0)
        low.add([vertex.index], 1 - share, "REPLACE")
        high.add([vertex.index], share, "REPLACE")
    pose = armature.pose.bones["high"]
    pose.rotation_mode = "XYZ"
    pose.rotation_euler = (0.3, 0.2, -0.4)
    modifier = obj.modifiers.new("Armature", "ARMATURE")
    modifier.object = armature
    return armature


def drive(key: bpy.types.ShapeKey, expression: str, **inputs: tuple[bpy.types.ID, str]) -> bpy.types.FCurve:
    """A driver on the key's value; inputs: variable name → (datablock, data path)."""
    curve = key.driver_add("value")
    curve.driver.type = "SCRIPTED"
    for name, (block, path) in inputs.items():
        variable = curve.driver.variables.new()
        variable.name = name
        if isinstance(block, bpy.types.Key):
            variable.targets[0].id_type = "KEY"
        variable.targets[0].id = block
        variable.targets[0].data_path = path
    curve.driver.expression = expression
    return curve


def add_property(obj: bpy.types.Object, name: str, low: float = 0.0, high: float = 1.0, default: float = 0.0) -> None:
    """A real-valued custom property with limits."""
    obj[name] = float(default)
    obj.id_properties_ui(name).update(min=low, max=high, soft_min=low, soft_max=high, default=default)


def evaluated(*objects: bpy.types.Object) -> np.ndarray:
    """(V,3) float64 metres: Blender's evaluated vertices, one by one, in the order given."""
    bpy.context.view_layer.update()
    graph = bpy.context.evaluated_depsgraph_get()
    units = bpy.context.scene.unit_settings
    scale = units.scale_length if units.system != "NONE" else 1.0
    points = []
    for obj in objects:
        shown = obj.evaluated_get(graph)
        mesh = shown.to_mesh()
        matrix = [list(row) for row in shown.matrix_world]
        for vertex in mesh.vertices:
            co = (*vertex.co, 1.0)
            points.append([sum(matrix[row][k] * co[k] for k in range(4)) * scale for row in range(3)])
        shown.to_mesh_clear()
    return np.array(points)


class Spec:
    """A spec file read with numpy only, evaluated shape by shape."""

    def __init__(self, path: Path | str) -> None:
        with np.load(path, allow_pickle=False) as archive:
            self.arrays = {name: archive[name] for name in archive.files}
        self.json = json.loads(self.arrays.pop("json").tobytes().decode("utf-8"))
        self.parameters = {item["name"]: item for item in self.json["parameters"]}
        self.left_out = {item["name"]: item["reason"] for item in self.json["left_out"]}
        self.updates = -1
        self.objects = [bpy.data.objects[item["object"]] for item in self.json["meshes"]]

    def delta(self, name: str, negative: bool = False) -> np.ndarray:
        dense = np.zeros((len(self.arrays["neutral"]), 3))
        shape = self.parameters[name]["negative_shape" if negative else "shape"]
        if shape is not None:
            rows = slice(*self.arrays["shape_offsets"][shape : shape + 2])
            dense[self.arrays["shape_vertices"][rows]] = self.arrays["shape_deltas"][rows]
        return dense

    def vertices(self, values: Mapping[str, float]) -> np.ndarray:
        total = self.arrays["neutral"].astype(np.float64)
        for name, value in values.items():
            offset = value - self.parameters[name]["default"]
            negative = offset < 0 and self.parameters[name]["negative_shape"] is not None
            total += offset * self.delta(name, negative)
        return total

    def random(self, seed: int) -> dict[str, float]:
        random = np.random.RandomState(seed)
        return {name: float(random.uniform(item["minimum"], item["maximum"])) for name, item in self.parameters.items()}


def largest_error(path: Path | str, apply: Callable[[str, Mapping[str, float]], object], count: int = 3) -> float:
    """Largest distance in metres, over random values, between the spec and Blender after applying them."""
    spec, worst = Spec(path), 0.0
    for seed in range(count):
        values = spec.random(seed)
        apply(str(path), values)
        worst = max(worst, float(np.abs(evaluated(*spec.objects) - spec.vertices(values)).max()))
    return worst
