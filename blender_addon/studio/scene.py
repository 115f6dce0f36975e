# SPDX-License-Identifier: GPL-3.0-or-later
"""Camera, lights and background around the artist's rig, in a scene of their own.

The artist's objects are linked into a temporary scene and nothing of them is written: no object, collection, world,
camera or render setting of the file changes, and everything made here is gone when the context ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import bpy
import numpy as np
from mathutils import Matrix, Vector

from ..messages import RigError
from .sampling import DEFAULT_LIGHT, blackbody_rgb, check_light

SENSOR_WIDTH_MM = 36.0
# Blender's lower limit for a lens.
SHORTEST_LENS_MM = 1.0
LARGEST_SIDE_PX = 16384

# Lights stand this many subject sizes away from its centre: far enough for even light, near enough for soft shadows.
LIGHT_DISTANCE = 4.0

# A Cycles area light of P watts at distance d gives a white Lambertian surface that faces it the radiance
# P / (4 π² d²) · 4 = P / (π² d²): on-axis intensity P / π, irradiance P / (π d²), radiance irradiance / π.
WATTS_PER_STRENGTH = math.pi**2

# The third number of a light is measured from the key: fill on the other side, rim from behind.
FILL_TURN_DEG, FILL_ELEVATION_DEG, FILL_SIZE = 80.0, 5.0, 2.5
RIM_TURN_DEG, RIM_ELEVATION_DEG, RIM_SIZE = 165.0, 40.0, 1.0


@dataclass(frozen=True)
class Camera:
    """A checked camera (docs/architecture.md, "Camera JSON").

    width, height: pixels. focal_px, principal_px (2,): pixels. rotation (3,3), translation (3,) metres:
    x_cam = rotation · x_rig + translation, camera frame x right, y down, z forward.
    """

    width: int
    height: int
    focal_px: float
    principal_px: tuple[float, float]
    rotation: np.ndarray
    translation: np.ndarray


def read_camera(camera: dict) -> Camera:
    """Check a camera JSON. RigError bad_camera with the reason."""
    try:
        width, height = camera["width"], camera["height"]
        focal_px = float(camera["focal_px"])
        principal = np.asarray(camera["principal_px"], dtype=np.float64)
        rotation = np.asarray(camera["rotation"], dtype=np.float64)
        translation = np.asarray(camera["translation"], dtype=np.float64)
    except KeyError as error:
        raise RigError("bad_camera", reason=f"it has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise RigError("bad_camera", reason=str(error)) from None
    if any(isinstance(side, bool) or int(side) != side or not 4 <= side <= LARGEST_SIDE_PX for side in (width, height)):
        raise RigError("bad_camera", reason=f"width and height must be whole numbers from 4 to {LARGEST_SIDE_PX}")
    for name, value, shape in (
        ("principal_px", principal, (2,)),
        ("rotation", rotation, (3, 3)),
        ("translation", translation, (3,)),
    ):
        if value.shape != shape or not np.isfinite(value).all():
            raise RigError("bad_camera", reason=f"{name} must be {shape} finite numbers")
    if not math.isfinite(focal_px) or focal_px * SENSOR_WIDTH_MM < SHORTEST_LENS_MM * width:
        raise RigError("bad_camera", reason=f"focal_px {focal_px:g} is too short for a width of {width} pixels")
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-3 or np.linalg.det(rotation) < 0:
        raise RigError("bad_camera", reason="rotation is not a rotation matrix")
    return Camera(int(width), int(height), focal_px, (principal[0], principal[1]), rotation, translation)


@contextlib.contextmanager
def studio_scene(
    camera: dict,
    *,
    light: dict | None = None,
    background: Iterable[float] | None = None,
    objects: Iterable[str] | None = None,
    hide: Iterable[str] | None = None,
) -> Iterator[bpy.types.Scene]:
    """A temporary scene with the rig, seen through `camera`; removed at the end, whatever happens inside.

    camera: camera JSON, metres in the rig frame. light: see `sampling.DEFAULT_LIGHT`; parts left out take its values.
    background: (3,) sRGB, 0…1, exactly what the picture shows behind the rig; overrides the light's.
    objects: names of what to show (default: everything that the open scene would render). hide: names to leave out.
    RigError bad_camera, bad_light, nothing_to_render.
    """
    view = read_camera(camera)
    given = dict(light or {})
    if background is not None:
        given["background"] = background
    lamp = check_light({**DEFAULT_LIGHT, **given})
    artist = bpy.context.scene
    shown = _shown_objects(artist, objects, hide)
    with contextlib.ExitStack() as undo:
        scene = bpy.data.scenes.new("rigfit studio")
        undo.callback(bpy.data.scenes.remove, scene)
        _copy_time_and_units(artist, scene)
        for item in shown:
            scene.collection.objects.link(item)
        undo.enter_context(_instanced_lights_off(shown))
        per_unit = artist.unit_settings.scale_length or 1.0
        camera_object = _add(undo, scene, bpy.data.cameras, "camera", bpy.data.cameras.new("rigfit camera"))
        scene.camera = camera_object
        _aim(camera_object, view, per_unit)
        scene.render.resolution_x, scene.render.resolution_y = view.width, view.height
        scene.render.resolution_percentage = 100
        scene.world = _world(undo, _to_linear(lamp["background"]), lamp["world"])
        corners = _bounds(scene, shown)
        _set_clipping(camera_object, corners)
        centre, size = _subject(lamp, view, corners, per_unit)
        towards_camera = camera_object.matrix_world.translation - centre
        for name, azimuth, elevation, edge, strength in (
            ("key", lamp["azimuth_deg"], lamp["elevation_deg"], lamp["size"], lamp["strength"]),
            (
                "fill",
                lamp["azimuth_deg"] - math.copysign(FILL_TURN_DEG, lamp["azimuth_deg"]),
                FILL_ELEVATION_DEG,
                FILL_SIZE,
                lamp["strength"] * lamp["fill"],
            ),
            (
                "rim",
                lamp["azimuth_deg"] - math.copysign(RIM_TURN_DEG, lamp["azimuth_deg"]),
                RIM_ELEVATION_DEG,
                RIM_SIZE,
                lamp["strength"] * lamp["rim"],
            ),
        ):
            if strength <= 0:
                continue
            data = bpy.data.lights.new(f"rigfit {name}", "AREA")
            item = _add(undo, scene, bpy.data.lights, name, data)
            distance = LIGHT_DISTANCE * size
            direction = _direction(towards_camera, azimuth, elevation)
            item.location = centre + distance * direction
            item.rotation_mode = "QUATERNION"
            # An area light shines along its −Z.
            item.rotation_quaternion = direction.to_track_quat("Z", "Y")
            data.shape = "SQUARE"
            data.size = edge * size
            data.energy = strength * WATTS_PER_STRENGTH * distance**2
            data.color = blackbody_rgb(lamp["temperature_k"]) if name == "key" else (1.0, 1.0, 1.0)
            # Seen by nothing but surfaces: not by the camera, in whose picture it would stand.
            item.visible_camera = False
        yield scene


# --- the rig ----------------------------------------------------------------------------------------------------------

_SEEN_TYPES = {"MESH", "CURVE", "CURVES", "SURFACE", "META", "FONT", "POINTCLOUD", "VOLUME", "EMPTY"}


def _shown_objects(
    scene: bpy.types.Scene, objects: Iterable[str] | None, hide: Iterable[str] | None
) -> list[bpy.types.Object]:
    """What the scene would render (object and collection render visibility), without lights, cameras and `hide`."""
    wanted = None if objects is None else set(objects)
    hidden = set(hide or ())
    shown: dict[str, bpy.types.Object] = {}
    waiting = [scene.view_layers[0].layer_collection]
    if bpy.context.view_layer is not None and bpy.context.scene == scene:
        waiting = [bpy.context.view_layer.layer_collection]
    while waiting:
        layer = waiting.pop()
        if layer.exclude or layer.collection.hide_render:
            continue
        waiting.extend(layer.children)
        for item in layer.collection.objects:
            if item.type in _SEEN_TYPES and not item.hide_render and item.name not in hidden:
                shown[item.name] = item
    if wanted is not None:
        shown = {name: item for name, item in shown.items() if name in wanted}
    if not any(item.type != "EMPTY" or item.instance_collection is not None for item in shown.values()):
        raise RigError("nothing_to_render")
    return list(shown.values())


@contextlib.contextmanager
def without_subsurface(scene: bpy.types.Scene) -> Iterator[None]:
    """Light does not go under the surfaces of the scene's materials while the context lasts.

    Takes subsurface weights that are plain numbers; one that a texture or a driver sets stays as it is.
    """
    trees = [
        slot.material.node_tree
        for item in scene.objects
        for slot in item.material_slots
        if slot.material is not None and slot.material.node_tree is not None
    ]
    changed: list[tuple[bpy.types.NodeSocket, float]] = []
    seen: set[int] = set()
    while trees:
        tree = trees.pop()
        if tree.as_pointer() in seen:
            continue
        seen.add(tree.as_pointer())
        for node in tree.nodes:
            if node.type == "GROUP" and node.node_tree is not None:
                trees.append(node.node_tree)
            elif node.type == "BSDF_PRINCIPLED":
                weight = node.inputs["Subsurface Weight"]
                if not weight.is_linked and weight.default_value:
                    changed.append((weight, weight.default_value))
                    weight.default_value = 0.0
    try:
        yield
    finally:
        for weight, value in changed:
            weight.default_value = value


@contextlib.contextmanager
def _instanced_lights_off(shown: Iterable[bpy.types.Object]) -> Iterator[None]:
    """Lights inside collections that an empty instances come along with it; they are off while the context lasts."""
    lights = {
        item.name: item
        for empty in shown
        if empty.instance_collection is not None
        for item in empty.instance_collection.all_objects
        if item.type in {"LIGHT", "LIGHT_PROBE"} and not item.hide_render
    }
    for item in lights.values():
        item.hide_render = True
    try:
        yield
    finally:
        for item in lights.values():
            item.hide_render = False


def _copy_time_and_units(source: bpy.types.Scene, target: bpy.types.Scene) -> None:
    """The moment of the animation and the units, on which drivers and modifiers depend."""
    # The render takes the open scene's frame by itself; the bounds are evaluated before it.
    target.frame_start = min(source.frame_start, source.frame_current)
    target.frame_end = max(source.frame_end, source.frame_current)
    target.frame_current = source.frame_current
    target.frame_subframe = source.frame_subframe
    target.render.fps = source.render.fps
    target.render.fps_base = source.render.fps_base
    target.unit_settings.system = source.unit_settings.system
    target.unit_settings.scale_length = source.unit_settings.scale_length


def _bounds(scene: bpy.types.Scene, shown: Iterable[bpy.types.Object]) -> np.ndarray:
    """(N,3) float64 corners of the evaluated bounding boxes, Blender units, world space; N may be 0."""
    layer = scene.view_layers[0]
    layer.update()
    depsgraph = layer.depsgraph
    corners = []
    for item in shown:
        if item.type == "EMPTY":
            continue
        evaluated = item.evaluated_get(depsgraph)
        world = np.array(evaluated.matrix_world)
        box = np.array([tuple(corner) for corner in evaluated.bound_box])
        corners.append(box @ world[:3, :3].T + world[:3, 3])
    points = np.concatenate(corners) if corners else np.zeros((0, 3))
    return points[np.isfinite(points).all(axis=1)]


# --- camera -----------------------------------------------------------------------------------------------------------


def _aim(item: bpy.types.Object, view: Camera, per_unit: float) -> None:
    """Give the camera object the pose and the lens of `view`; per_unit: metres per Blender unit."""
    # Blender's camera looks along −Z with Y up; ours along +Z with y down.
    to_world = view.rotation.T @ np.diag([1.0, -1.0, -1.0])
    location = -view.rotation.T @ view.translation / per_unit
    matrix = np.eye(4)
    matrix[:3, :3] = to_world
    matrix[:3, 3] = location
    item.rotation_mode = "QUATERNION"
    item.matrix_world = Matrix(matrix.tolist())
    lens = item.data
    lens.type = "PERSP"
    lens.sensor_fit = "HORIZONTAL"
    lens.sensor_width = SENSOR_WIDTH_MM
    lens.lens_unit = "MILLIMETERS"
    lens.lens = view.focal_px * SENSOR_WIDTH_MM / view.width
    # Shifts are fractions of the width on both axes (sensor fit horizontal), x to the right and y up.
    lens.shift_x = (view.width / 2 - view.principal_px[0]) / view.width
    lens.shift_y = (view.principal_px[1] - view.height / 2) / view.width
    lens.dof.use_dof = False


def _set_clipping(item: bpy.types.Object, corners: np.ndarray) -> None:
    """Clip range around the rig: half the nearest depth to twice the farthest."""
    matrix = np.array(item.matrix_world)
    depth = -(corners - matrix[:3, 3]) @ matrix[:3, 2]
    farthest = depth.max(initial=0.0)
    if farthest <= 0:
        return
    item.data.clip_end = 2 * farthest
    item.data.clip_start = max(0.5 * depth.min(), 1e-3 * farthest)


# --- light ------------------------------------------------------------------------------------------------------------


def _subject(lamp: dict, view: Camera, corners: np.ndarray, per_unit: float) -> tuple[Vector, float]:
    """Centre and size (Blender units) of what is lit: as the light says, else what the camera looks at."""
    if lamp["centre"] is not None:
        return Vector(np.asarray(lamp["centre"], dtype=float) / per_unit), lamp["size_m"] / per_unit
    position = -view.rotation.T @ view.translation / per_unit
    middle = corners.mean(axis=0) if len(corners) else np.zeros(3)
    pixel = [(view.width / 2 - view.principal_px[0]) / view.focal_px]
    pixel.append((view.height / 2 - view.principal_px[1]) / view.focal_px)
    ray = view.rotation.T @ np.array([*pixel, 1.0])
    depth = max(float(view.rotation[2] @ (middle - position)), 1e-3)
    # A face fills about 60 % of the height in the pictures that rigfit makes and solves.
    return Vector(position + depth * ray), 0.6 * depth * view.height / view.focal_px


def _direction(towards_camera: Vector, azimuth_deg: float, elevation_deg: float) -> Vector:
    """Unit vector from the subject to a light: azimuth about Z from the camera's side, elevation above the horizon."""
    start = math.atan2(towards_camera.y, towards_camera.x)
    azimuth, elevation = start + math.radians(azimuth_deg), math.radians(elevation_deg)
    return Vector(
        (math.cos(elevation) * math.cos(azimuth), math.cos(elevation) * math.sin(azimuth), math.sin(elevation))
    )


def _to_linear(colour: Iterable[float]) -> tuple[float, ...]:
    """(3,) linear colour of an sRGB one; IEC 61966-2-1, the sRGB transfer curve."""
    return tuple(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in colour)


def _world(undo: contextlib.ExitStack, colour: tuple[float, ...], level: float) -> bpy.types.World:
    """White light of `level` from everywhere, while the camera itself sees `colour`."""
    world = bpy.data.worlds.new("rigfit world")
    undo.callback(bpy.data.worlds.remove, world)
    if bpy.app.version < (5, 0):
        world.use_nodes = True
    tree = world.node_tree
    tree.nodes.clear()
    output = tree.nodes.new("ShaderNodeOutputWorld")
    choice = tree.nodes.new("ShaderNodeMixShader")
    path = tree.nodes.new("ShaderNodeLightPath")
    ambient, seen = tree.nodes.new("ShaderNodeBackground"), tree.nodes.new("ShaderNodeBackground")
    ambient.inputs["Color"].default_value = (1.0, 1.0, 1.0, 1.0)
    ambient.inputs["Strength"].default_value = level
    seen.inputs["Color"].default_value = (*colour, 1.0)
    seen.inputs["Strength"].default_value = 1.0
    tree.links.new(path.outputs["Is Camera Ray"], choice.inputs[0])
    tree.links.new(ambient.outputs[0], choice.inputs[1])
    tree.links.new(seen.outputs[0], choice.inputs[2])
    tree.links.new(choice.outputs[0], output.inputs["Surface"])
    return world


def _add(
    undo: contextlib.ExitStack,
    scene: bpy.types.Scene,
    collection: bpy.types.bpy_prop_collection,
    name: str,
    data: object,
) -> bpy.types.Object:
    """An object for `data`, linked into the scene; both are removed at the end (the data last)."""
    undo.callback(collection.remove, data)
    item = bpy.data.objects.new(f"rigfit {name}", data)
    undo.callback(bpy.data.objects.remove, item)
    scene.collection.objects.link(item)
    return item
