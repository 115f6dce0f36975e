# SPDX-License-Identifier: GPL-3.0-or-later
"""Which shape keys are driven, and by what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import bpy

from ..compat import fcurves, text

_KEY_VALUE = re.compile(r'key_blocks\["((?:[^"\\]|\\.)*)"\]\.value$', re.DOTALL)
_PROPERTY = re.compile(r'^(?:pose\.bones\["((?:[^"\\]|\\.)*)"\])?\["((?:[^"\\]|\\.)*)"\]$', re.DOTALL)


@dataclass(frozen=True)
class KeyInput:
    """A driver reads the value of a shape key."""

    keys: bpy.types.Key
    name: str


@dataclass(frozen=True)
class PropertyInput:
    """A driver reads a custom property of an object or, with `bone`, of a pose bone of it."""

    object: bpy.types.Object
    property: str
    bone: str | None = None

    @property
    def owner(self) -> bpy.types.Object | bpy.types.PoseBone | None:
        """The holder of the custom property; None if the bone is gone."""
        return self.object if self.bone is None else self.object.pose.bones.get(self.bone)

    @property
    def path(self) -> str:
        """Data path of the property from its object."""
        escape = bpy.utils.escape_identifier
        bone = "" if self.bone is None else f'pose.bones["{escape(self.bone)}"]'
        return f'{bone}["{escape(self.property)}"]'


@dataclass(frozen=True)
class OtherInput:
    """A driver reads something that rigfit does not move: a bone, a transform, the frame."""

    description: str


Input = KeyInput | PropertyInput | OtherInput


def key_name(data_path: str) -> str | None:
    """The shape key whose value the path means, or None."""
    match = _KEY_VALUE.search(data_path)
    return bpy.utils.unescape_identifier(match.group(1)) if match else None


def driven_keys(keys: bpy.types.Key) -> dict[str, bpy.types.FCurve]:
    """Driver F-curve by name of the driven shape key. A muted driver does not count."""
    if keys.animation_data is None:
        return {}
    found = {key_name(text(curve, "data_path")): curve for curve in keys.animation_data.drivers if not curve.mute}
    return {name: curve for name, curve in found.items() if name is not None}


def animated_keys(keys: bpy.types.Key) -> set[str]:
    """Names of the shape keys that an action animates."""
    return {name for curve in fcurves(keys.animation_data) if (name := key_name(text(curve, "data_path"))) is not None}


def inputs(curve: bpy.types.FCurve) -> list[Input]:
    """The different things that the driver reads."""
    found: list[Input] = []
    for variable in curve.driver.variables:
        for target in variable.targets:
            item = _input(variable.type, target)
            if item not in found:
                found.append(item)
    if curve.driver.type == "SCRIPTED" and re.search(r"\b(frame|depsgraph|self)\b", curve.driver.expression):
        found.append(OtherInput("the expression " + curve.driver.expression))
    return found


def _input(kind: str, target: bpy.types.DriverTarget) -> Input:
    block = target.id
    if kind != "SINGLE_PROP" or block is None:
        where = "nothing" if block is None else text(block)
        bone = text(target, "bone_target")
        return OtherInput(f"{kind.replace('_', ' ').lower()} of {where}" + (f", bone {bone}" if bone else ""))
    path = text(target, "data_path")
    name = key_name(path)
    if name is not None:
        mesh = block.data if isinstance(block, bpy.types.Object) else block
        keys = mesh if isinstance(mesh, bpy.types.Key) else getattr(mesh, "shape_keys", None)
        if keys is not None:
            return KeyInput(keys, name)
    match = _PROPERTY.match(path)
    if match and isinstance(block, bpy.types.Object):
        bone, prop = match.groups()
        unescape = bpy.utils.unescape_identifier
        return PropertyInput(block, unescape(prop), None if bone is None else unescape(bone))
    return OtherInput(f"{path} of {text(block)}")


def describe(curve: bpy.types.FCurve) -> str:
    """Words for `left_out`: what drives the key."""
    found = inputs(curve)
    if not found:
        return "driven by an expression without variables"
    texts = []
    for item in found:
        if isinstance(item, KeyInput):
            texts.append(f"the key {item.name}")
        elif isinstance(item, PropertyInput):
            bone = f", bone {item.bone}" if item.bone else ""
            texts.append(f"the property {item.property} of {text(item.object)}{bone}")
        else:
            texts.append(item.description)
    suffix = " together (a corrective)" if len(found) > 1 else ""
    return "driven by " + " and ".join(texts) + suffix


def all_inputs() -> Iterator[Input]:
    """What all drivers in the file read: a parameter among them moves more than its own shape keys."""
    for collection in ("objects", "meshes", "shape_keys", "armatures", "lattices", "curves", "node_groups"):
        for block in getattr(bpy.data, collection):
            animation = block.animation_data
            if animation is not None:
                for curve in animation.drivers:
                    if not curve.mute:
                        yield from inputs(curve)
