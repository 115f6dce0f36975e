# SPDX-License-Identifier: GPL-3.0-or-later
"""The face parameters of a rig: find them in the artist's objects, write values to them by name, read them back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import bpy
import numpy as np

from ..compat import text
from ..messages import RigError
from . import names
from .checks import require, why_not_writable
from .drivers import KeyInput, PropertyInput, animated_keys, describe, driven_keys, inputs

NOTES = "rigfit"
SCHEMA = "rigfit.rig/1"
# Beyond this a limit means "no limit": Blender's own default for a custom property is ±3.4e38.
_FINITE = 1e6


@dataclass(frozen=True)
class Source:
    """Where a parameter lives: a shape key, or a custom property of an object or of a pose bone."""

    kind: str
    object: str
    key: str | None = None
    property: str | None = None
    sign: int = 1
    bone: str | None = None


@dataclass(frozen=True)
class Parameter:
    """One number that the rig exposes, in units of its slider."""

    name: str
    group: str
    minimum: float
    maximum: float
    default: float
    sources: tuple[Source, ...]

    @property
    def signed_pair(self) -> bool:
        """Is it made of two opposite keys, each of which takes one side of zero?"""
        return any(source.sign < 0 for source in self.sources)

    def source_value(self, source: Source, value: float) -> float:
        """What the source gets when the parameter has this value."""
        return max(source.sign * value, 0.0) if self.signed_pair else value


@dataclass
class Discovery:
    """What a rig exposes. left_out: (name, reason)."""

    objects: list[bpy.types.Object]
    parameters: list[Parameter] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


# --- objects and keys -------------------------------------------------------------------------------------------------


def resolve_objects(wanted: Sequence[str] | None = None) -> list[bpy.types.Object]:
    """The mesh objects with these names; None: the selected ones, else all visible ones with shape keys.

    Raises RigError object_missing, no_selection, no_shape_keys.
    """
    meshes = {text(obj): obj for obj in bpy.context.scene.objects if obj.type == "MESH"}
    if wanted is not None:
        missing = [name for name in wanted if name not in meshes]
        if missing:
            raise RigError("object_missing", objects=", ".join(missing))
        chosen = [meshes[name] for name in dict.fromkeys(wanted)]
        if not chosen:
            raise RigError("no_selection")
    else:
        chosen = [obj for obj in meshes.values() if obj.select_get()]
        if not chosen:
            keyed = [obj for obj in meshes.values() if key_blocks(obj)]
            chosen = [obj for obj in keyed if obj.visible_get()] or keyed
        if not chosen:
            raise RigError("no_shape_keys", objects="This file")
    chosen.sort(key=lambda obj: (not key_blocks(obj), text(obj)))
    return chosen


def key_blocks(obj: bpy.types.Object) -> dict[str, bpy.types.ShapeKey]:
    """Shape keys by name, without the reference key."""
    keys = obj.data.shape_keys
    if keys is None:
        return {}
    return {text(block): block for block in keys.key_blocks if block != keys.reference_key}


def rig_notes(obj: bpy.types.Object) -> dict[str, Any]:
    """The JSON in the custom property `rigfit`: {"pairs": {name: [plus, minus]}, "groups": {name: group},
    "appearance": [property], "parts": {material: part}}; all optional.

    Raises RigError bad_rig_notes.
    """
    raw = obj.get(NOTES)
    if raw is None:
        return {}

    def refuse(reason: str) -> RigError:
        return RigError("bad_rig_notes", objects=text(obj), reason=reason)

    if not isinstance(raw, str):
        raise refuse("it is not a text")
    try:
        notes = json.loads(raw)
    except (json.JSONDecodeError, RecursionError):
        raise refuse("it is not JSON") from None
    if not isinstance(notes, dict):
        raise refuse("it is not a JSON object")
    pairs, groups = notes.get("pairs", {}), notes.get("groups", {})
    appearance, parts = notes.get("appearance", []), notes.get("parts", {})
    if not isinstance(pairs, dict) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(key, str) for key in pair)
        for pair in pairs.values()
    ):
        raise refuse("'pairs' is not {name: [plus key, minus key]}")
    if not isinstance(groups, dict) or not all(group in names.GROUPS for group in groups.values()):
        raise refuse("'groups' is not {name: " + "|".join(names.GROUPS) + "}")
    if not isinstance(appearance, list) or not all(isinstance(item, str) for item in appearance):
        raise refuse("'appearance' is not a list of property names")
    if not isinstance(parts, dict) or not all(part in names.PARTS for part in parts.values()):
        raise refuse("'parts' is not {material: " + "|".join(names.PARTS) + "}")
    return {"pairs": pairs, "groups": groups, "appearance": appearance, "parts": parts}


# --- discovery --------------------------------------------------------------------------------------------------------


def discover(objects: Sequence[bpy.types.Object], pairs: bool = True, merge_sides: bool = False) -> Discovery:
    """All face parameters of the objects, in the order of their keys.

    Same-named keys of several meshes are one parameter whose range is what all of them allow. Driven keys are left out;
    if one custom property drives a key, that property becomes a parameter instead.
    pairs: make one signed parameter of opposite keys (…-incr / …-decr) by their names; pairs that the custom property
    `rigfit` names are always made. merge_sides: make one parameter of left and right keys.
    """
    found = Discovery(list(objects))
    notes = [rig_notes(obj) for obj in objects]
    groups = {name: group for note in notes for name, group in note.get("groups", {}).items()}
    free, properties = _sort_keys(found)
    singles = _key_parameters(found, free)
    named = {name: tuple(pair) for note in notes for name, pair in note.get("pairs", {}).items()}
    made = _make_pairs(singles, named, pairs)
    if merge_sides:
        made = _merge_sides(made)
    for parameter in made:
        keys = [source.key for source in parameter.sources]
        group = next((groups[name] for name in (parameter.name, *keys) if name in groups), None)
        if group is None:
            kinds = {names.group_of(name) for name in (parameter.name, *keys) if name}
            group = "expression" if "expression" in kinds else "identity"
        found.parameters.append(replace(parameter, group=group))
    taken = {parameter.name for parameter in found.parameters}
    for item in properties:
        _add_property(found, [item], groups, taken, None)
    for prop, owners in _appearance(objects, notes).items():
        known = {(s.object, s.property) for p in found.parameters for s in p.sources if s.kind == "property"}
        owners = [owner for owner in owners if (text(owner.object), prop) not in known]
        if owners:
            _add_property(found, owners, groups, taken, "appearance")
    return found


def _sort_keys(found: Discovery) -> tuple[dict[str, list[tuple[bpy.types.Object, Any]]], list[PropertyInput]]:
    """Free keys by name with their objects, and the properties that stand in for driven keys."""
    free: dict[str, list[tuple[bpy.types.Object, Any]]] = {}
    properties: list[PropertyInput] = []
    seen: set[bpy.types.Key] = set()
    for obj in found.objects:
        keys = obj.data.shape_keys
        if keys is None or keys in seen:
            continue
        seen.add(keys)
        driven, animated = driven_keys(keys), animated_keys(keys)
        for name, block in key_blocks(obj).items():
            curve = driven.get(name)
            if curve is not None:
                reason = describe(curve)
                read = inputs(curve)
                if len(read) == 1 and isinstance(read[0], PropertyInput):
                    problem = _property_problem(read[0])
                    if problem is None:
                        reason += ", which is used instead"
                        if read[0] not in properties:
                            properties.append(read[0])
                    else:
                        reason += f" ({problem})"
                elif len(read) == 1 and isinstance(read[0], KeyInput):
                    reason += ", which it follows"
                found.left_out.append((name, reason))
            elif not block.slider_min < block.slider_max:
                found.left_out.append((name, f"its slider in {text(obj)} has no range"))
            else:
                free.setdefault(name, []).append((obj, block))
                if name in animated:
                    found.warnings.append(f"{name} of {text(obj)} is animated: the animation overwrites a fit later")
                if block.mute:
                    found.warnings.append(f"{name} of {text(obj)} is muted: applying a fit unmutes it")
    return free, properties


def _key_parameters(found: Discovery, free: Mapping[str, list[tuple[bpy.types.Object, Any]]]) -> list[Parameter]:
    parameters = []
    for name, places in free.items():
        minimum = max(block.slider_min for _, block in places)
        maximum = min(block.slider_max for _, block in places)
        if not minimum < maximum:
            found.left_out.append((name, "the sliders of its meshes have no common range"))
            continue
        sources = tuple(Source("shape_key", text(obj), key=name) for obj, _ in places)
        default = min(max(0.0, minimum), maximum)
        parameters.append(Parameter(name, "identity", float(minimum), float(maximum), float(default), sources))
    return parameters


def _pairable(parameter: Parameter | None) -> bool:
    """Each key of a pair must have 0 as its lower end, or the sides of the pair would overlap."""
    return parameter is not None and parameter.minimum == 0.0 and not parameter.signed_pair


def _make_pairs(singles: list[Parameter], named: Mapping[str, tuple[str, str]], by_name: bool) -> list[Parameter]:
    by = {parameter.name: parameter for parameter in singles}
    wanted: list[names.Pair] = []
    used: set[str] = set()
    for name, (plus, minus) in named.items():
        clash = name in by and name not in (plus, minus)
        if (
            plus != minus
            and not clash
            and not {plus, minus} & used
            and all(_pairable(by.get(k)) for k in (plus, minus))
        ):
            wanted.append(names.Pair(name, plus, minus))
            used |= {plus, minus}
    if by_name:
        rest = [name for name in by if name not in used]
        taken = {pair.name for pair in wanted}
        wanted += [
            pair
            for pair in names.opposite_pairs(rest)
            if _pairable(by[pair.plus]) and _pairable(by[pair.minus]) and pair.name not in taken
        ]
    at = {pair.plus: pair for pair in wanted} | {pair.minus: pair for pair in wanted}
    made, done = [], set()
    for parameter in singles:
        pair = at.get(parameter.name)
        if pair is None:
            made.append(parameter)
        elif pair.name not in done:
            done.add(pair.name)
            plus, minus = by[pair.plus], by[pair.minus]
            sources = plus.sources + tuple(replace(source, sign=-1) for source in minus.sources)
            made.append(Parameter(pair.name, "identity", -minus.maximum, plus.maximum, 0.0, sources))
    return made


def _merge_sides(parameters: list[Parameter]) -> list[Parameter]:
    by = {parameter.name: parameter for parameter in parameters}
    at: dict[str, names.Pair] = {}
    for pair in names.side_pairs(list(by)):
        left, right = by[pair.plus], by[pair.minus]
        if (left.minimum, left.maximum, left.signed_pair) == (right.minimum, right.maximum, right.signed_pair):
            at[pair.plus] = at[pair.minus] = pair
    made, done = [], set()
    for parameter in parameters:
        pair = at.get(parameter.name)
        if pair is None:
            made.append(parameter)
        elif pair.name not in done:
            done.add(pair.name)
            left, right = by[pair.plus], by[pair.minus]
            made.append(replace(left, name=pair.name, sources=left.sources + right.sources))
    return made


# --- custom properties ------------------------------------------------------------------------------------------------


def _limits(owner: Any, prop: str) -> tuple[float, float, float] | None:
    """(minimum, maximum, default) if both limits are finite; the soft limits count where the hard ones are open."""
    try:
        ui = owner.id_properties_ui(prop).as_dict()
    except TypeError:
        return None
    low = max(ui.get("min", -math.inf), ui.get("soft_min", -math.inf))
    high = min(ui.get("max", math.inf), ui.get("soft_max", math.inf))
    if not (-_FINITE < low < high < _FINITE):
        return None
    return float(low), float(high), float(min(max(ui.get("default", 0.0), low), high))


def _property_problem(item: PropertyInput) -> str | None:
    """Why the custom property cannot be a parameter, or None."""
    owner = item.owner
    if owner is None or item.property not in owner.keys():  # noqa: SIM118 (`in owner` is about sub-objects)
        return "that property does not exist"
    value = owner[item.property]
    if not isinstance(value, float):
        return "that property is not a single real number"
    if _limits(owner, item.property) is None:
        return "that property has no finite limits"
    animation = item.object.animation_data
    if animation is not None and any(text(curve, "data_path") == item.path for curve in animation.drivers):
        return "that property has a driver itself"
    return None


def _add_property(
    found: Discovery, items: list[PropertyInput], groups: Mapping[str, str], taken: set[str], group: str | None
) -> None:
    prop = items[0].property
    good = []
    for item in items:
        problem = _property_problem(item)
        if problem is None:
            good.append(item)
        else:
            found.left_out.append((prop, f"property of {text(item.object)}: {problem}"))
    if not good:
        return
    limits = [limit for item in good if (limit := _limits(item.owner, prop)) is not None]
    minimum, maximum = max(limit[0] for limit in limits), min(limit[1] for limit in limits)
    if not minimum < maximum:
        found.left_out.append((prop, "its objects give it no common range"))
        return
    name = prop if prop not in taken else f"{text(good[0].object)}.{prop}"
    taken.add(name)
    sources = tuple(Source("property", text(i.object), property=prop, bone=i.bone) for i in good)
    group = group or groups.get(name) or groups.get(prop) or names.group_of(prop)
    default = min(max(limits[0][2], minimum), maximum)
    found.parameters.append(Parameter(name, group, minimum, maximum, default, sources))


def _appearance(
    objects: Sequence[bpy.types.Object], notes: Sequence[Mapping[str, Any]]
) -> dict[str, list[PropertyInput]]:
    """Properties that the notes name or that an Attribute node (type Object) of a material reads."""
    found: dict[str, list[PropertyInput]] = {}
    for obj, note in zip(objects, notes, strict=True):
        wanted = list(note.get("appearance", []))
        for slot in obj.material_slots:
            if slot.material is not None and slot.material.node_tree is not None:
                wanted += _read_attributes(slot.material.node_tree, set())
        for prop in dict.fromkeys(wanted):
            if prop in obj.keys():  # noqa: SIM118
                found.setdefault(prop, []).append(PropertyInput(obj, prop))
    return found


def _read_attributes(tree: bpy.types.NodeTree, seen: set[bpy.types.NodeTree]) -> list[str]:
    if tree in seen:
        return []
    seen.add(tree)
    wanted = []
    for node in tree.nodes:
        if node.bl_idname == "ShaderNodeAttribute" and node.attribute_type == "OBJECT":
            name = text(node, "attribute_name")
            wanted.append(name[2:-2] if name.startswith('["') and name.endswith('"]') else name)
        elif getattr(node, "node_tree", None) is not None:
            wanted += _read_attributes(node.node_tree, seen)
    return wanted


# --- writing and reading values ---------------------------------------------------------------------------------------


def read_spec(path: str) -> dict[str, Any]:
    """The JSON of a rig spec. Raises RigError file_missing, bad_spec."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            document = json.loads(archive["json"].tobytes().decode("utf-8"))
    except FileNotFoundError:
        raise RigError("file_missing", path=path) from None
    except Exception:  # whatever zip, numpy and json raise on bytes that are no spec
        raise RigError("bad_spec", path=path, reason="it is damaged or no rig spec") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise RigError("bad_spec", path=path, reason=f"its schema is not {SCHEMA}")
    return document


def spec_parameters(document: Mapping[str, Any], path: str = "") -> list[Parameter]:
    """The parameters in a spec's JSON. Raises RigError bad_spec."""
    try:
        return [
            Parameter(
                item["name"],
                item["group"],
                float(item["minimum"]),
                float(item["maximum"]),
                float(item["default"]),
                tuple(
                    Source(
                        s["kind"],
                        s["object"],
                        key=s.get("key"),
                        property=s.get("property"),
                        sign=int(s.get("sign", 1)),
                        bone=s.get("bone"),
                    )
                    for s in item["sources"]
                ),
            )
            for item in document["parameters"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RigError("bad_spec", path=path, reason="its parameters are incomplete") from None


@dataclass
class _Write:
    """One number that will be written: to a shape key, or to a custom property."""

    object: bpy.types.Object
    name: str
    value: float
    key: bpy.types.ShapeKey | None = None
    owner: Any = None

    def read(self) -> float:
        return self.key.value if self.key is not None else float(self.owner[self.name])

    def put(self, value: float) -> None:
        if self.key is not None:
            set_key_value(self.key, value)
        else:
            self.owner[self.name] = float(value)
            self.object.update_tag()

    def kept(self) -> bool:
        wanted = np.float32(self.value) if self.key is not None else self.value
        return self.read() == wanted


def set_key_value(key: bpy.types.ShapeKey, value: float) -> None:
    """Set a value that may lie outside the slider range (Blender clamps silently); the range stays as it is."""
    low, high = key.slider_min, key.slider_max
    if not low <= value <= high:
        key.slider_min, key.slider_max = min(low, value), max(high, value)
        key.value = value
        key.slider_min, key.slider_max = low, high
    else:
        key.value = value


def _within(value: float, minimum: float, maximum: float) -> bool:
    """Is the value inside, allowing for the last bit of a float32?"""
    slack = 1e-6 * (maximum - minimum)
    return minimum - slack <= value <= maximum + slack


def apply_parameters(
    spec_path: str, values: Mapping[str, float], objects: Sequence[str] | None = None
) -> dict[str, list]:
    """Write parameter values to the artist's rig by name. Everything is checked before anything is written.

    values: by parameter name, in slider units; parameters that are not named keep what they have.
    objects: write to these objects only. Returns {"written": [names], "left_out": [{name, reason}], "unmuted": [names],
    "warnings": [texts]}. Raises RigError; then the rig is as it was.
    """
    document = read_spec(spec_path)
    parameters = {parameter.name: parameter for parameter in spec_parameters(document, spec_path)}
    for name, value in values.items():
        if name not in parameters:
            raise RigError("parameter_unknown", name=name)
        if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            raise RigError("value_not_finite", name=name)
        limits = parameters[name]
        if not _within(value, limits.minimum, limits.maximum):
            raise RigError(
                "value_out_of_limits", name=name, value=value, minimum=limits.minimum, maximum=limits.maximum
            )
    chosen = {name: parameters[name] for name in values}
    writes, left_out = _plan(document, chosen, values, objects)
    warnings, unmuted = [], []
    before = [(write, write.read()) for write in writes]
    was_muted = [write.key for write in writes if write.key is not None and write.key.mute and write.value != 0.0]
    try:
        for write in writes:
            write.put(write.value)
        for key in was_muted:
            key.mute = False
            unmuted.append(text(key))
        bpy.context.view_layer.update()
        lost = next((write for write in writes if not write.kept()), None)
        if lost is not None:
            raise RigError("write_lost", name=lost.name, objects=text(lost.object))
    except BaseException:
        for write, value in before:
            write.put(value)
        for key in was_muted:
            key.mute = True
        bpy.context.view_layer.update()
        raise
    for obj in {write.object for write in writes if write.key is not None}:
        for name in sorted(animated_keys(obj.data.shape_keys) & {w.name for w in writes if w.object == obj and w.key}):
            warnings.append(f"{name} of {text(obj)} is animated: the value lasts until the frame changes")
    skipped = {item["name"] for item in left_out}
    return {
        "written": [name for name in chosen if name not in skipped],
        "left_out": left_out,
        "unmuted": unmuted,
        "warnings": warnings,
    }


def _plan(
    document: Mapping[str, Any],
    chosen: Mapping[str, Parameter],
    values: Mapping[str, float],
    only: Sequence[str] | None,
) -> tuple[list[_Write], list[dict[str, str]]]:
    """All writes with every check passed, or a RigError."""
    here = {text(obj): obj for obj in bpy.context.scene.objects}
    if only is not None:
        missing = [name for name in only if name not in here]
        if missing:
            raise RigError("object_missing", objects=", ".join(missing))
    counts = {mesh["object"]: mesh.get("control_vertices", -1) for mesh in document.get("meshes", [])}
    sources = [source for parameter in chosen.values() for source in parameter.sources]
    together = [here[name] for name in {*counts, *(source.object for source in sources)} if name in here]
    for kind in ("shape_key", "property"):
        for name in dict.fromkeys(s.object for s in sources if s.kind == kind):
            if only is not None and name not in only:
                continue
            obj = here.get(name)
            if obj is None or (kind == "shape_key" and obj.type != "MESH"):
                raise RigError("object_missing", objects=name)
            require(why_not_writable(obj, kind == "shape_key", together))
            if kind == "shape_key" and counts.get(name, -1) not in (-1, len(obj.data.vertices)):
                raise RigError("mesh_changed", objects=name, now=len(obj.data.vertices), before=counts[name])

    writes: list[_Write] = []
    left_out: list[dict[str, str]] = []
    cache: dict[str, tuple[dict, dict]] = {}
    for name, parameter in chosen.items():
        todo = [source for source in parameter.sources if only is None or source.object in only]
        if not todo:
            left_out.append({"name": name, "reason": "it belongs to objects that were not chosen"})
        for source in todo:
            # float32 before the limits: the slider holds no more.
            amount = parameter.source_value(source, min(max(float(values[name]), parameter.minimum), parameter.maximum))
            write = _plan_one(here[source.object], source, amount, cache)
            writes.append(write)
    return writes, left_out


def _plan_one(obj: bpy.types.Object, source: Source, amount: float, cache: dict[str, tuple[dict, dict]]) -> _Write:
    if source.kind == "shape_key":
        if source.object not in cache:
            keys = obj.data.shape_keys
            cache[source.object] = (key_blocks(obj), driven_keys(keys) if keys is not None else {})
        blocks, driven = cache[source.object]
        name = source.key or ""
        if name in driven:
            raise RigError("driven", name=name, objects=source.object)
        if name not in blocks:
            raise RigError("source_missing", name=f"The shape key {name}", objects=source.object)
        key = blocks[name]
        if not _within(amount, key.slider_min, key.slider_max):
            raise RigError(
                "value_out_of_limits", name=name, value=amount, minimum=key.slider_min, maximum=key.slider_max
            )
        return _Write(obj, name, min(max(amount, key.slider_min), key.slider_max), key=key)
    item = PropertyInput(obj, source.property or "", source.bone)
    owner = item.owner
    if owner is None or not isinstance(owner.get(item.property), float):
        raise RigError("source_missing", name=f"The custom property {item.property}", objects=source.object)
    if _property_problem(item) == "that property has a driver itself":
        raise RigError("driven", name=item.property, objects=source.object)
    return _Write(obj, item.property, amount, owner=owner)


def read_parameters(spec_path: str, objects: Sequence[str] | None = None) -> dict[str, Any]:
    """The values that the rig has now: {"values": {name: value}, "left_out": [{name, reason}]}.

    A parameter of several keys has the value of its first ones; a pair that is open on both sides, the difference.
    """
    document = read_spec(spec_path)
    here = {text(obj): obj for obj in bpy.context.scene.objects}
    cache: dict[str, dict[str, bpy.types.ShapeKey]] = {}
    values: dict[str, float] = {}
    left_out: list[dict[str, str]] = []
    for parameter in spec_parameters(document, spec_path):
        found: dict[int, float] = {}
        for source in parameter.sources:
            obj = here.get(source.object)
            if obj is None or source.sign in found or (objects is not None and source.object not in objects):
                continue
            if source.kind == "shape_key" and obj.type == "MESH":
                if source.object not in cache:
                    cache[source.object] = key_blocks(obj)
                block = cache[source.object].get(source.key or "")
                if block is not None:
                    found[source.sign] = block.value
            elif source.kind == "property":
                owner = PropertyInput(obj, source.property or "", source.bone).owner
                value = owner.get(source.property) if owner is not None else None
                if isinstance(value, (int, float)):
                    found[source.sign] = float(value)
        if found:
            values[parameter.name] = found.get(1, 0.0) - found.get(-1, 0.0)
        else:
            left_out.append({"name": parameter.name, "reason": "its keys or properties are not in the chosen objects"})
    return {"values": values, "left_out": left_out}


# --- putting back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """One number as it was, by names: it outlives undo, which makes references stale."""

    object: str
    name: str
    value: float
    mute: bool = False
    bone: str | None = None
    is_key: bool = True


def hold(spec_path: str, names: Sequence[str]) -> list[Held]:
    """Everything that `apply_parameters` of these parameters would write, as it is now."""
    wanted = set(names)
    here = {text(obj): obj for obj in bpy.context.scene.objects}
    blocks: dict[str, dict[str, bpy.types.ShapeKey]] = {}
    held: list[Held] = []
    for parameter in spec_parameters(read_spec(spec_path), spec_path):
        for source in parameter.sources if parameter.name in wanted else ():
            obj = here.get(source.object)
            if obj is None:
                continue
            if source.kind == "shape_key":
                if source.object not in blocks:
                    blocks[source.object] = key_blocks(obj) if obj.type == "MESH" else {}
                block = blocks[source.object].get(source.key or "")
                if block is not None:
                    held.append(Held(source.object, source.key or "", block.value, block.mute))
            else:
                owner = PropertyInput(obj, source.property or "", source.bone).owner
                value = owner.get(source.property) if owner is not None else None
                if isinstance(value, float):
                    held.append(Held(source.object, source.property or "", value, bone=source.bone, is_key=False))
    return held


def put_back(held: Sequence[Held]) -> list[str]:
    """Write what was held; returns the names of what is no longer there. RigError as `checks.why_not_writable`."""
    here = {text(obj): obj for obj in bpy.context.scene.objects}
    objects = {item.object: here[item.object] for item in held if item.object in here}
    for name, obj in objects.items():
        kinds = {item.is_key for item in held if item.object == name}
        for is_key in kinds:
            require(why_not_writable(obj, is_key, objects.values()))
    blocks = {name: key_blocks(obj) for name, obj in objects.items() if obj.type == "MESH"}
    lost = []
    for item in held:
        if item.is_key:
            block = blocks.get(item.object, {}).get(item.name)
            if block is None:
                lost.append(item.name)
                continue
            set_key_value(block, item.value)
            block.mute = item.mute
        else:
            obj = objects.get(item.object)
            owner = PropertyInput(obj, item.name, item.bone).owner if obj is not None else None
            if owner is None or item.name not in owner.keys():  # noqa: SIM118
                lost.append(item.name)
                continue
            owner[item.name] = item.value
            obj.update_tag()
    bpy.context.view_layer.update()
    return lost
