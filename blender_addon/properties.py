# SPDX-License-Identifier: GPL-3.0-or-later
"""What the artist sets: stored in the scene (target, photos, options), in the rig (locks), or for this session only."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import bpy

from .compat import text
from .fit.target import has_keys
from .messages import RigError


class RIGFIT_PG_photo(bpy.types.PropertyGroup):
    """One photo of the person"""

    path: bpy.props.StringProperty(name="Photo", subtype="FILE_PATH", description="A photo of the person")


class RIGFIT_PG_lock(bpy.types.PropertyGroup):
    """A face parameter (its name) that fits leave alone"""


def _toggle_lock(self: "RIGFIT_PG_row", context: bpy.types.Context) -> None:
    obj = bpy.data.objects.get(self.owner)
    if obj is None or not obj.is_editable:
        return
    at = obj.rigfit_locks.find(self.name)
    if self.locked and at < 0:
        obj.rigfit_locks.add().name = self.name
    elif not self.locked and at >= 0:
        obj.rigfit_locks.remove(at)


class RIGFIT_PG_row(bpy.types.PropertyGroup):
    """A face parameter in the list of the panel"""

    owner: bpy.props.StringProperty()
    group: bpy.props.StringProperty()
    value: bpy.props.FloatProperty()
    standard_deviation: bpy.props.FloatProperty()
    known: bpy.props.BoolProperty(description="The photo tells this parameter")
    fitted: bpy.props.BoolProperty()
    locked: bpy.props.BoolProperty(
        name="Lock", description="Fits leave this parameter at the value it has", update=_toggle_lock
    )


def _is_target(self: bpy.types.PropertyGroup, obj: bpy.types.Object) -> bool:
    return has_keys(obj)


class RIGFIT_PG_scene(bpy.types.PropertyGroup):
    """What to fit, and how"""

    target: bpy.props.PointerProperty(
        name="Target",
        type=bpy.types.Object,
        poll=_is_target,
        description="The head to fit, a mesh with shape keys. Empty: what is selected",
    )
    photos: bpy.props.CollectionProperty(type=RIGFIT_PG_photo)
    photo_index: bpy.props.IntProperty()
    solve: bpy.props.EnumProperty(
        name="Fit",
        items=(
            ("both", "Both", "Fit who the person is and what the face does"),
            ("identity", "Identity", "Fit who the person is; the expression stays as it is"),
            ("expression", "Expression", "Fit what the face does; the identity stays as it is"),
        ),
        default="both",
    )
    face: bpy.props.IntProperty(
        name="Face",
        min=0,
        max=99,
        description="Which face of the first photo, when there are several: 0 is the largest",
    )
    use_focal: bpy.props.BoolProperty(
        name="Focal Length", description="Set the focal length of the photo instead of reading or estimating it"
    )
    focal_mm: bpy.props.FloatProperty(
        name="Focal Length",
        description="35 mm equivalent: about 26 for a phone, 85 for a portrait lens",
        min=5.0,
        max=2000.0,
        soft_max=200.0,
        default=50.0,
    )
    check: bpy.props.BoolProperty(
        name="Check Render",
        description="After the fit, a Blender in the background renders the result as the photo saw it",
        default=True,
    )


def _strength_changed(self: "RIGFIT_PG_session", context: bpy.types.Context) -> None:
    from .fit.job import apply_strength
    from .link.pump import status

    result = status().result
    if result is None or result.undone or result.strength == self.strength:
        return
    try:
        apply_strength(result, self.strength)
        status().clear_error()
    except RigError as error:
        status().fail(error)


class RIGFIT_PG_session(bpy.types.PropertyGroup):
    """What the panel shows in this session"""

    strength: bpy.props.FloatProperty(
        name="Strength",
        description="How much of the fit is applied: 0 leaves the face as it was. Can be moved after the fit, too",
        subtype="FACTOR",
        min=0.0,
        max=1.0,
        default=1.0,
        update=_strength_changed,
    )
    rows: bpy.props.CollectionProperty(type=RIGFIT_PG_row)
    row_index: bpy.props.IntProperty()
    only_unknown: bpy.props.BoolProperty(
        name="What the Photo Cannot Tell",
        description="List only the parameters that the photo does not determine: they are at their default",
    )
    picture: bpy.props.EnumProperty(
        name="Picture",
        items=(
            ("render", "Render", "The check render beside the photo"),
            ("over", "Overlay", "The check render over the photo"),
            ("landmarks", "Landmarks", "The landmarks as found in the photo and as fitted"),
        ),
    )


CLASSES = (RIGFIT_PG_photo, RIGFIT_PG_lock, RIGFIT_PG_row, RIGFIT_PG_scene, RIGFIT_PG_session)


def locks_of(obj: bpy.types.Object) -> frozenset[str]:
    """The names of the parameters that are locked on a rig."""
    return frozenset(text(item) for item in obj.rigfit_locks)


def register() -> None:
    for cls in CLASSES:
        bpy.utils.register_class(cls)
    bpy.types.Scene.rigfit = bpy.props.PointerProperty(type=RIGFIT_PG_scene)
    bpy.types.WindowManager.rigfit = bpy.props.PointerProperty(type=RIGFIT_PG_session, options={"SKIP_SAVE"})
    # Not `Object.rigfit`: that custom property holds the artist's notes for the exporter.
    bpy.types.Object.rigfit_locks = bpy.props.CollectionProperty(type=RIGFIT_PG_lock)


def unregister() -> None:
    del bpy.types.Object.rigfit_locks
    del bpy.types.WindowManager.rigfit
    del bpy.types.Scene.rigfit
    for cls in reversed(CLASSES):
        bpy.utils.unregister_class(cls)
