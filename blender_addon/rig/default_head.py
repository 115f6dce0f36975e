# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the default head in the current scene from a head description (`rigfit.rig.default_head`).

One mesh object with a Basis and its shape keys, a material per part, and the appearance parameters as custom
properties of the object, which the materials read with Attribute nodes: no drivers, no scripts. The object's custom
property `rigfit` is a JSON string, {"pairs": {parameter: [plus key, minus key]}, "groups": {key or pair: group},
"appearance": [property names], "parts": {material name: part}}, from which the exporter makes signed parameters.
The face attribute `rigfit_part` holds the index of each polygon's part in the order of the rig spec's `parts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from typing import Any

import bpy
import numpy as np

from ..messages import RigError
from .steps import run_through

SCHEMA = "rigfit.head/1"
NAME_BYTES = 63
HAIRS_A_STEP = 5

# Linear RGB. Skin from light to dark, seen in daylight.
_SKIN_RAMP = (
    (0.00, (0.800, 0.545, 0.430)),
    (0.25, (0.660, 0.378, 0.258)),
    (0.50, (0.430, 0.225, 0.135)),
    (0.75, (0.205, 0.093, 0.050)),
    (1.00, (0.062, 0.027, 0.016)),
)
_IRIS_RAMP = (
    (0.00, (0.020, 0.008, 0.003)),
    (0.20, (0.090, 0.035, 0.011)),
    (0.40, (0.170, 0.095, 0.028)),
    (0.60, (0.120, 0.155, 0.065)),
    (0.80, (0.080, 0.170, 0.270)),
    (1.00, (0.250, 0.300, 0.330)),
)
_PART_OF_MATERIAL = {
    "Skin": "skin",
    "Lips": "lips",
    "Eye": "eye",
    "Iris": "iris",
    "Lash": "lash",
    "Brow": "brow",
    "Teeth": "teeth",
    "Tongue": "tongue",
    "Mouth": "other",
}


def build_default_head(description_path: str | os.PathLike[str]) -> bpy.types.Object:
    """Read a head description and add the object "Head" to the current scene; returns it. All keys are at 0.

    Raises RigError (kind `bad_head_description`) before anything is added to the file.
    """
    return run_through(build_steps(description_path))


def build_steps(description_path: str | os.PathLike[str]) -> Generator[tuple[int, int, str], None, bpy.types.Object]:
    """`build_default_head` in steps of a few milliseconds; yields (done, total, text).

    The head joins the scene at the end; closing the generator before leaves nothing in the file.
    """
    meta, arrays = _read(description_path)
    made: list[tuple[Any, Any]] = []
    try:
        mesh = _mesh(meta, arrays)
        made.append((bpy.data.meshes, mesh))
        head = bpy.data.objects.new("Head", mesh)
        made.append((bpy.data.objects, head))
        total = len(meta["keys"]) + 100
        for done in _shape_keys(head, meta, arrays):
            yield done, total, "Making the shape keys"
        painted: dict[str, np.ndarray] = {}
        for name, strokes in (
            ("Brow", _brow_steps(meta["brow"]["curve_mm"], meta["brow"]["canvas_mm"])),
            ("Lash", _lash_steps()),
        ):
            for painted[name] in strokes:
                yield len(meta["keys"]) + 20, total, "Painting brows and lashes"
        _appearance(head, meta)
        parts: dict[str, str] = {}
        for name in meta["materials"]:
            yield len(meta["keys"]) + 80, total, "Making the materials"
            before = set(bpy.data.images)
            material = _MATERIALS[name](name, {**meta, "painted": painted})
            made.append((bpy.data.materials, material))
            made += [(bpy.data.images, image) for image in bpy.data.images if image not in before]
            mesh.materials.append(material)
            parts[material.name] = _PART_OF_MATERIAL[name]
        head["rigfit"] = json.dumps(
            {
                "pairs": meta["pairs"],
                "groups": meta["groups"],
                "appearance": [item["name"] for item in meta["appearance"]],
                "parts": parts,
            }
        )
        mesh.update()
        bpy.context.scene.collection.objects.link(head)
    except BaseException:
        for collection, block in reversed(made):
            collection.remove(block)
        raise
    return head


def _read(path: str | os.PathLike[str]) -> tuple[dict, dict[str, np.ndarray]]:
    names = ("vertices", "polygons", "uv", "part", "material", "attributes")
    names += ("key_offsets", "key_vertices", "key_deltas")
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(bytes(file["json"]).decode("utf-8"))
            arrays = {name: file[name] for name in names}
        if meta.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {meta.get('schema')!r}, not {SCHEMA!r}")
        count = len(arrays["vertices"])
        inside = arrays["polygons"].min() >= 0 and arrays["polygons"].max() < count
        if not inside or len(arrays["key_offsets"]) != len(meta["keys"]) + 1:
            raise ValueError("its arrays do not fit together")
        long = [name for name in meta["keys"] if len(name.encode("utf-8")) > NAME_BYTES]
        if long:
            raise ValueError(f"the key name {long[0]!r} is longer than {NAME_BYTES} bytes")
        unknown = [name for name in meta["materials"] if name not in _MATERIALS]
        if unknown:
            raise ValueError(f"the material {unknown[0]!r} is unknown")
    except Exception as error:
        raise RigError("bad_head_description", path=str(path), reason=str(error)) from error
    return meta, arrays


def _mesh(meta: dict, arrays: dict[str, np.ndarray]) -> bpy.types.Mesh:
    mesh = bpy.data.meshes.new("Head")
    mesh.from_pydata(arrays["vertices"].tolist(), [], arrays["polygons"].tolist())
    count = len(mesh.polygons)
    layer = mesh.uv_layers.new(name="UVMap")
    layer.data.foreach_set("uv", np.ascontiguousarray(arrays["uv"], dtype=np.float32).ravel())
    mesh.polygons.foreach_set("material_index", arrays["material"].astype(np.int32))
    # The cap under the neck is flat: a smooth one would bend the normals of the skin beside it.
    cap = (arrays["part"] == meta["parts"].index("other")) & (arrays["material"] == meta["materials"].index("Skin"))
    mesh.polygons.foreach_set("use_smooth", ~cap)
    part = mesh.attributes.new("rigfit_part", "INT", "FACE")
    part.data.foreach_set("value", arrays["part"].astype(np.int32)[:count])
    for name, values in zip(meta["attributes"], arrays["attributes"], strict=True):
        attribute = mesh.attributes.new(name, "FLOAT", "POINT")
        attribute.data.foreach_set("value", np.ascontiguousarray(values, dtype=np.float32))
    mesh.update()
    return mesh


def _shape_keys(head: bpy.types.Object, meta: dict, arrays: dict[str, np.ndarray]) -> Iterator[int]:
    """Add the shape keys; yields how many there are."""
    basis = arrays["vertices"].astype(np.float32)
    offsets, ids, deltas = arrays["key_offsets"], arrays["key_vertices"], arrays["key_deltas"]
    head.shape_key_add(name="Basis", from_mix=False)
    for k, name in enumerate(meta["keys"]):
        key = head.shape_key_add(name=name, from_mix=False)
        rows = slice(int(offsets[k]), int(offsets[k + 1]))
        moved = basis.copy()
        moved[ids[rows]] += deltas[rows]
        key.data.foreach_set("co", moved.ravel())
        key.slider_min, key.slider_max = 0.0, 1.0
        # Blender 5.0 and later start a new key at 1.0.
        key.value = 0.0
        yield k + 1


def _appearance(head: bpy.types.Object, meta: dict) -> None:
    for item in meta["appearance"]:
        head[item["name"]] = float(item["default"])
        head.id_properties_ui(item["name"]).update(
            min=float(item["minimum"]),
            max=float(item["maximum"]),
            soft_min=float(item["minimum"]),
            soft_max=float(item["maximum"]),
            default=float(item["default"]),
            description=item["description"],
        )


# ------------------------------------------------------------------------------------------------------- materials


class _Tree:
    """A few words for writing node trees: every method returns an output socket."""

    def __init__(self, name: str) -> None:
        self.material = bpy.data.materials.new(name)
        # From 5.0 on every material has nodes, and the switch is on its way out.
        if bpy.app.version < (5, 0, 0):
            self.material.use_nodes = True
        self.nodes, self.links = self.material.node_tree.nodes, self.material.node_tree.links
        self.nodes.clear()
        self.output = self.nodes.new("ShaderNodeOutputMaterial")
        self.column = 0

    def node(self, kind: str, inputs: dict | None = None, **settings: object):
        node = self.nodes.new(kind)
        self.column += 1
        node.location = (-1800 + 180 * (self.column % 9), 300 - 220 * (self.column // 9))
        for name, value in settings.items():
            setattr(node, name, value)
        for name, value in (inputs or {}).items():
            self.set(node.inputs[name], value)
        return node

    def set(self, socket, value: object) -> None:
        if isinstance(value, bpy.types.NodeSocket):
            self.links.new(value, socket)
        elif isinstance(value, tuple) and len(value) == 3 and socket.type == "RGBA":
            socket.default_value = (*value, 1.0)
        else:
            socket.default_value = value

    def attribute(self, name: str):
        return self.node("ShaderNodeAttribute", attribute_name=name).outputs["Fac"]

    def property(self, name: str):
        """A custom property of the object that wears the material."""
        return self.node("ShaderNodeAttribute", attribute_type="OBJECT", attribute_name=name).outputs["Fac"]

    def math(self, operation: str, a: object, b: object = 0.0, c: object = 0.0, clamp: bool = False):
        node = self.node("ShaderNodeMath", operation=operation, use_clamp=clamp)
        for socket, value in zip(node.inputs, (a, b, c), strict=False):
            self.set(socket, value)
        return node.outputs[0]

    def mix(self, factor: object, a: object, b: object, blend: str = "MIX"):
        node = self.node("ShaderNodeMix", data_type="RGBA", blend_type=blend, clamp_factor=True)
        # The sockets of the other data types share the names A and B: take the coloured ones.
        colours = [socket for socket in node.inputs if socket.type == "RGBA"]
        factors = [socket for socket in node.inputs if socket.type == "VALUE"]
        self.set(factors[0], factor)
        self.set(colours[0], a)
        self.set(colours[1], b)
        return next(socket for socket in node.outputs if socket.type == "RGBA")

    def range(self, value: object, low: float, high: float, to_low: float = 0.0, to_high: float = 1.0):
        node = self.node(
            "ShaderNodeMapRange",
            {"Value": value, "From Min": low, "From Max": high, "To Min": to_low, "To Max": to_high},
            interpolation_type="SMOOTHSTEP",
        )
        return node.outputs[0]

    def ramp(self, value: object, stops: tuple):
        node = self.node("ShaderNodeValToRGB", {"Fac": value})
        elements = node.color_ramp.elements
        while len(elements) < len(stops):
            elements.new(0.5)
        for element, (position, colour) in zip(elements, stops, strict=True):
            element.position = position
            element.color = (*colour, 1.0)
        return node.outputs["Color"]

    def noise(self, scale: float, detail: float = 2.0, vector: object = None):
        """Noise about 0.5 on the coordinates of the undeformed head, so that it sticks to the skin."""
        if vector is None:
            vector = self.node("ShaderNodeTexCoord").outputs["Generated"]
        node = self.node("ShaderNodeTexNoise", {"Vector": vector, "Scale": scale, "Detail": detail})
        return node.outputs[0]

    def bump(self, height: object, strength: float, distance: float, normal: object = None):
        node = self.node("ShaderNodeBump", {"Height": height, "Strength": strength, "Distance": distance})
        if normal is not None:
            self.set(node.inputs["Normal"], normal)
        return node.outputs[0]

    def finish(self, alpha: object = None, **inputs: object) -> bpy.types.Material:
        """Connect a Principled BSDF (argument names: spaces as underscores); alpha lets the background through."""
        shader = self.node("ShaderNodeBsdfPrincipled")
        for name, value in inputs.items():
            self.set(shader.inputs[name.replace("_", " ")], value)
        out = shader.outputs[0]
        if alpha is not None:
            mixer = self.node("ShaderNodeMixShader", {"Fac": alpha})
            self.links.new(self.node("ShaderNodeBsdfTransparent").outputs[0], mixer.inputs[1])
            self.links.new(out, mixer.inputs[2])
            out = mixer.outputs[0]
        self.links.new(out, self.output.inputs["Surface"])
        return self.material


def _skin(name: str, meta: dict) -> bpy.types.Material:
    """Skin and lips: one tree, blended by the point attribute `lip`, so that no line shows where the parts meet."""
    tree = _Tree(name)
    lip = tree.range(tree.attribute("lip"), 0.15, 0.75)
    tone = tree.ramp(tree.property("skin_tone"), _SKIN_RAMP)

    blotch = tree.range(tree.noise(9.0, 3.0), 0.3, 0.7, 0.90, 1.06)
    speckle = tree.range(tree.noise(140.0, 2.0), 0.3, 0.7, 0.95, 1.04)
    colour = tree.mix(1.0, tone, tree.math("MULTIPLY", blotch, speckle), "MULTIPLY")
    red = tree.mix(1.0, colour, (1.0, 0.70, 0.66), "MULTIPLY")
    colour = tree.mix(tree.math("MULTIPLY", tree.attribute("flush"), 0.55), colour, red)
    lid = tree.mix(1.0, colour, (0.86, 0.66, 0.62), "MULTIPLY")
    colour = tree.mix(tree.math("MULTIPLY", tree.attribute("lid"), 0.5), colour, lid)
    # A shaven scalp: the roots of the hair shine through as grey dots.
    roots = tree.range(tree.noise(420.0, 1.0), 0.35, 0.6, 0.45, 0.95)
    stubble = tree.mix(1.0, colour, (0.48, 0.47, 0.50), "MULTIPLY")
    colour = tree.mix(tree.math("MULTIPLY", tree.attribute("scalp"), roots), colour, stubble)

    amount = tree.property("lip_color")
    natural = tree.mix(1.0, tone, (0.86, 0.58, 0.56), "MULTIPLY")
    lips = tree.mix(tree.math("MULTIPLY", amount, 2.0, clamp=True), tone, natural)
    painted = tree.math("MULTIPLY_ADD", amount, 2.0, -1.0, clamp=True)
    lips = tree.mix(tree.math("MULTIPLY", painted, 0.85), lips, (0.20, 0.012, 0.022))
    colour = tree.mix(lip, colour, lips)

    pores = tree.bump(tree.noise(330.0, 2.0), 0.14, 0.0006)
    folds = tree.bump(tree.noise(45.0, 3.0), 0.10, 0.002, pores)
    # Lips: fine furrows from the mouth outwards, so noise that is stretched along Z.
    place = tree.node("ShaderNodeVectorMath", operation="MULTIPLY")
    tree.set(place.inputs[0], tree.node("ShaderNodeTexCoord").outputs["Generated"])
    place.inputs[1].default_value = (1.0, 0.35, 0.12)
    furrow = tree.math("MULTIPLY", tree.noise(150.0, 2.0, place.outputs["Vector"]), lip)
    folds = tree.bump(furrow, 0.35, 0.0010, folds)
    return tree.finish(
        Base_Color=colour,
        Roughness=tree.math("MULTIPLY_ADD", lip, -0.14, 0.50),
        Specular_IOR_Level=0.42,
        Subsurface_Weight=0.35,
        Subsurface_Radius=(1.0, 0.32, 0.16),
        Subsurface_Scale=0.005,
        Normal=folds,
    )


def _eye(name: str, meta: dict) -> bpy.types.Material:
    """Eyeball and iris: one tree. UV distance from (0.5, 0.5) is the angle from the gaze axis."""
    tree = _Tree(name)
    uv = tree.node("ShaderNodeUVMap", uv_map="UVMap").outputs["UV"]
    from_centre = tree.node("ShaderNodeVectorMath", operation="SUBTRACT")
    tree.set(from_centre.inputs[0], uv)
    from_centre.inputs[1].default_value = (0.5, 0.5, 0.0)
    flat = from_centre.outputs["Vector"]
    length = tree.node("ShaderNodeVectorMath", operation="LENGTH")
    tree.set(length.inputs[0], flat)
    radius = tree.math("DIVIDE", length.outputs["Value"], float(meta["iris_uv_radius"]))
    # Fibres: noise that depends on the direction and hardly on the radius.
    unit = tree.node("ShaderNodeVectorMath", operation="NORMALIZE")
    tree.set(unit.inputs[0], flat)
    depth = tree.node("ShaderNodeCombineXYZ", {"Z": tree.math("MULTIPLY", radius, 0.35)})
    place = tree.node("ShaderNodeVectorMath", operation="ADD")
    tree.set(place.inputs[0], unit.outputs["Vector"])
    tree.set(place.inputs[1], depth.outputs["Vector"])
    fibre = tree.range(tree.noise(11.0, 3.0, place.outputs["Vector"]), 0.3, 0.7, 0.55, 1.5)

    tint = tree.ramp(tree.property("iris_color"), _IRIS_RAMP)
    iris = tree.mix(1.0, tint, fibre, "MULTIPLY")
    collar = tree.mix(1.0, iris, (1.5, 1.25, 1.0), "MULTIPLY")
    iris = tree.mix(tree.range(radius, 0.62, 0.42), iris, collar)
    iris = tree.mix(tree.range(radius, 0.78, 1.0), iris, tree.mix(1.0, iris, (0.22, 0.20, 0.20), "MULTIPLY"))
    iris = tree.mix(tree.range(radius, 0.40, 0.34), iris, (0.002, 0.002, 0.002))
    veins = tree.range(tree.noise(30.0, 4.0), 0.52, 0.66)
    far = tree.range(radius, 1.2, 2.6)
    white = tree.mix(tree.math("MULTIPLY", veins, far), (0.70, 0.66, 0.63), (0.62, 0.42, 0.38))
    white = tree.mix(tree.math("MULTIPLY", far, 0.45), white, (0.55, 0.42, 0.38))
    colour = tree.mix(tree.range(radius, 0.95, 1.07), iris, white)
    return tree.finish(
        Base_Color=colour, Roughness=0.30, Specular_IOR_Level=0.3, Coat_Weight=1.0, Coat_Roughness=0.03, Coat_IOR=1.376
    )


def _teeth(name: str, meta: dict) -> bpy.types.Material:
    tree = _Tree(name)
    uv = tree.node("ShaderNodeSeparateXYZ", {"Vector": tree.node("ShaderNodeUVMap", uv_map="UVMap").outputs["UV"]})
    # The strip has 16 columns, one a tooth: 0 in the gap, 0.5 in the middle of a tooth.
    phase = tree.math("PINGPONG", tree.math("MULTIPLY", uv.outputs["X"], 16.0), 0.5)
    gap = tree.range(phase, 0.0, 0.07)
    colour = tree.mix(gap, (0.22, 0.12, 0.08), (0.74, 0.67, 0.56))
    return tree.finish(
        Base_Color=colour,
        Roughness=0.22,
        Subsurface_Weight=0.15,
        Subsurface_Radius=(1.0, 0.6, 0.4),
        Subsurface_Scale=0.002,
        Normal=tree.bump(tree.range(phase, 0.0, 0.4), 0.5, 0.0008),
    )


def _tongue(name: str, meta: dict) -> bpy.types.Material:
    tree = _Tree(name)
    spots = tree.range(tree.noise(160.0), 0.35, 0.65, 0.85, 1.1)
    colour = tree.mix(1.0, (0.48, 0.17, 0.15), spots, "MULTIPLY")
    return tree.finish(
        Base_Color=colour,
        Roughness=0.38,
        Subsurface_Weight=0.2,
        Subsurface_Scale=0.003,
        Normal=tree.bump(tree.noise(260.0), 0.3, 0.0005),
    )


def _mouth(name: str, meta: dict) -> bpy.types.Material:
    return _Tree(name).finish(Base_Color=(0.20, 0.045, 0.04), Roughness=0.35)


def _brow(name: str, meta: dict) -> bpy.types.Material:
    tree = _Tree(name)
    hair = _image_value(tree, _image("rigfit brow", meta["painted"]["Brow"]))
    strength = tree.property("eyebrow_strength")
    colour = tree.mix(strength, (0.110, 0.060, 0.034), (0.012, 0.008, 0.006))
    alpha = tree.math("MULTIPLY", hair, tree.range(strength, 0.0, 1.0, 0.06, 1.0), clamp=True)
    return _cut_out(tree.finish(alpha, Base_Color=colour, Roughness=0.6, Specular_IOR_Level=0.2))


def _lash(name: str, meta: dict) -> bpy.types.Material:
    tree = _Tree(name)
    hair = _image_value(tree, _image("rigfit lash", meta["painted"]["Lash"]))
    return _cut_out(tree.finish(hair, Base_Color=(0.012, 0.008, 0.006), Roughness=0.55, Specular_IOR_Level=0.2))


def _cut_out(material: bpy.types.Material) -> bpy.types.Material:
    material.surface_render_method = "DITHERED"
    return material


_MATERIALS = {
    "Skin": _skin,
    "Lips": _skin,
    "Eye": _eye,
    "Iris": _eye,
    "Lash": _lash,
    "Brow": _brow,
    "Teeth": _teeth,
    "Tongue": _tongue,
    "Mouth": _mouth,
}


# ---------------------------------------------------------------------------------------------------- painted hair


def _image(name: str, values: np.ndarray) -> bpy.types.Image:
    """A grey image inside the .blend file; values: (H,W) 0…1, first row at the bottom."""
    height, width = values.shape
    image = bpy.data.images.new(name, width, height, alpha=False)
    image.colorspace_settings.name = "Non-Color"
    pixels = np.ones((height, width, 4), dtype=np.float32)
    pixels[..., :3] = values[..., None]
    image.pixels.foreach_set(pixels.ravel())
    image.update()
    image.pack()
    return image


def _image_value(tree: _Tree, image: bpy.types.Image):
    uv = tree.node("ShaderNodeUVMap", uv_map="UVMap").outputs["UV"]
    node = tree.node("ShaderNodeTexImage", {"Vector": uv}, image=image, extension="CLIP")
    return node.outputs["Color"]


def _stroke(canvas: np.ndarray, points: np.ndarray, width: float, opacity: float) -> None:
    """Draw one hair, tapering to its tip: points (n,2) pixels from root to tip, width in pixels at the root."""
    low = np.maximum(np.floor(points.min(axis=0) - width - 1).astype(int), 0)
    high = np.minimum(np.ceil(points.max(axis=0) + width + 2).astype(int), canvas.shape[::-1])
    if (high <= low).any():
        return
    x, y = np.meshgrid(np.arange(low[0], high[0]) + 0.5, np.arange(low[1], high[1]) + 0.5)
    cover = np.zeros(x.shape)
    n = len(points) - 1
    for i in range(n):
        (ax, ay), (bx, by) = points[i], points[i + 1]
        dx, dy = bx - ax, by - ay
        t = np.clip(((x - ax) * dx + (y - ay) * dy) / max(dx * dx + dy * dy, 1e-9), 0, 1)
        distance = np.hypot(x - ax - t * dx, y - ay - t * dy)
        half = 0.5 * width * (1 - 0.85 * ((i + t) / n) ** 1.5)
        cover = np.maximum(cover, np.clip(half - distance + 0.5, 0, 1))
    part = canvas[low[1] : high[1], low[0] : high[0]]
    part[:] = 1 - (1 - part) * (1 - opacity * cover)


def _bend(root: np.ndarray, angle: float, length: float, turn: float) -> np.ndarray:
    """Seven points of a hair: starts in direction `angle` (radians), turns by `turn` on its way."""
    steps = angle + turn * (np.arange(6) + 0.5) / 6
    path = np.stack([np.cos(steps), np.sin(steps)], axis=-1) * length / 6
    return np.concatenate([root[None], root + np.cumsum(path, axis=0)])


def paint_brow(curve_mm: list, canvas_mm: list, pixels_per_mm: float = 18.0, hairs: int = 520) -> np.ndarray:
    """(H,W) 0…1: hairs along a brow's centre line, first row at the bottom, u outwards from the nose.

    curve_mm: rows (x, y, half height); canvas_mm: left, bottom, width, height; both from the front, in millimetres.
    """
    *_, canvas = _brow_steps(curve_mm, canvas_mm, pixels_per_mm, hairs)
    return canvas


def _brow_steps(curve_mm: list, canvas_mm: list, pixels_per_mm: float = 18.0, hairs: int = 520) -> Iterator[np.ndarray]:
    """`paint_brow` a few hairs a step; the last that it yields is the picture."""
    random = np.random.default_rng(20)
    left, bottom, width, height = canvas_mm
    canvas = np.zeros((round(height * pixels_per_mm), round(width * pixels_per_mm)))
    curve = np.array(curve_mm, dtype=np.float64)
    t = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(curve[:, :2], axis=0), axis=1))])
    t /= t[-1]

    # A soft shade under the hairs, as skin between dense hair is not seen.
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]]
    x, y = left + (x + 0.5) / pixels_per_mm, bottom + (y + 0.5) / pixels_per_mm
    fine = np.stack([np.interp(np.linspace(0, 1, 60), t, curve[:, k]) for k in range(3)], axis=-1)
    for px, py, half in fine:
        # Beyond 1.15 half heights there is no shade.
        rows = slice(*np.searchsorted(y[:, 0], [py - 1.16 * half, py + 1.16 * half]))
        columns = slice(*np.searchsorted(x[0], [px - 1.16 * half, px + 1.16 * half]))
        reach = np.hypot(x[rows, columns] - px, y[rows, columns] - py) / half
        shade = 0.34 * np.clip(1.15 - reach, 0, 1) ** 1.2
        part = canvas[rows, columns]
        np.maximum(part, shade * min(1.0, 0.35 + (px - fine[0, 0]) / 12.0), out=part)
        yield canvas

    for k in range(hairs):
        s = (k + random.random()) / hairs
        px, py, half = (np.interp(s, t, curve[:, j]) for j in range(3))
        ahead = min(s + 0.05, 1.0)
        behind = max(s - 0.05, 0.0)
        slope = np.arctan2(
            np.interp(ahead, t, curve[:, 1]) - np.interp(behind, t, curve[:, 1]),
            np.interp(ahead, t, curve[:, 0]) - np.interp(behind, t, curve[:, 0]),
        )
        across = random.uniform(-1, 0.75)
        # Near the nose hairs stand up; further out they lie along the brow, the lower ones rising, the upper ones
        # sinking.
        stand = np.radians(72) * np.exp(-s / 0.16)
        lie = np.radians(-24 * across + 10)
        angle = slope + stand + lie * (1 - np.exp(-s / 0.12)) + random.normal(0, 0.10)
        length = (6.6 - 2.6 * s) * random.uniform(0.7, 1.15) * (0.75 if s < 0.06 else 1.0)
        root = np.array([px - np.cos(slope) * length * 0.35, py + across * half * 0.85 - np.sin(angle) * length * 0.25])
        path = _bend(root, angle, length, -0.35 * random.uniform(0.4, 1.2))
        path = (path - (left, bottom)) * pixels_per_mm
        faint = 0.45 + 0.55 * min(1.0, s / 0.12)
        _stroke(canvas, path, random.uniform(2.0, 3.2), faint * random.uniform(0.55, 0.95))
        if k % HAIRS_A_STEP == 0:
            yield canvas
    yield np.clip(canvas, 0, 1).astype(np.float32)


def paint_lash(width: int = 1024, height: int = 128, hairs: int = 95) -> np.ndarray:
    """(H,W) 0…1: lashes, roots on the first row (the lid), tips above, u outwards from the nose."""
    *_, canvas = _lash_steps(width, height, hairs)
    return canvas


def _lash_steps(width: int = 1024, height: int = 128, hairs: int = 95) -> Iterator[np.ndarray]:
    """`paint_lash` a few hairs a step; the last that it yields is the picture."""
    random = np.random.default_rng(21)
    canvas = np.zeros((height, width))
    for k in range(hairs):
        u = 0.03 + 0.94 * (k + random.uniform(-0.3, 0.3)) / (hairs - 1)
        length = height * random.uniform(0.62, 0.95) * (0.55 + 0.45 * min(1.0, u / 0.3))
        lean = np.pi / 2 + np.radians(22) * (0.35 - u) + random.normal(0, 0.08)
        path = _bend(np.array([u * width, -2.0]), lean, length, random.normal(0, 0.15))
        _stroke(canvas, path, random.uniform(3.5, 5.5), 0.9)
        if k % HAIRS_A_STEP == 0:
            yield canvas
    root = np.clip(1 - np.arange(height) / (0.10 * height), 0, 1)[:, None]
    yield np.clip(np.maximum(canvas, 0.75 * root), 0, 1).astype(np.float32)
