# SPDX-License-Identifier: GPL-3.0-or-later
"""Every error kind of the add-on and its one sentence with the fix. No bpy in here."""

from __future__ import annotations

MESSAGES: dict[str, str] = {
    "no_selection": "Nothing is selected: select the head mesh (or meshes) of the rig and try again.",
    "no_shape_keys": "{objects} has no shape keys to fit: select a mesh with shape keys, or add some.",
    "file_missing": "There is no file {path}: check the name.",
    "file_unreadable": "{path} cannot be opened as a .blend file ({reason}): save it again from Blender.",
    "file_unwritable": "{path} cannot be written ({reason}): choose another folder.",
    "file_newer": "{path} was saved by a newer Blender ({saved}) than this one ({running}), which cannot read all of it: "
    "open it with that Blender.",
    "bad_request": "The request {method} cannot be served: {reason}.",
    "bad_camera": "The camera cannot be used: {reason}.",
    "bad_light": "The light cannot be used: {reason}.",
    "bad_sampling": "The samples cannot be drawn: {reason}.",
    "nothing_to_render": "Nothing would be seen in the render: show the head mesh in the viewport and in renders.",
    "no_cycles": "This Blender was built without Cycles: use Blender from blender.org.",
    "render_failed": "Blender could not render ({reason}): try fewer pixels or samples.",
    "bad_head_description": "{path} is no head description ({reason}): write it again with `rigfit rig default`.",
    "object_missing": "There is no mesh object named {objects} in this file: check the name, or export the rig again.",
    "no_parameters": "{objects} has shape keys, but none can be moved freely ({reason}): free at least one of them.",
    "hidden": "{objects} is hidden: show it in the viewport and try again.",
    "edit_mode": "{objects} is in {mode} mode: press Tab to go back to Object Mode and try again.",
    "absolute_keys": "{objects} has absolute shape keys: tick Relative in the shape key panel and try again.",
    "pinned_key": "{objects} shows one pinned shape key only: click the pin in the shape key panel to release it.",
    "linked": "{objects} is linked from {library}: make it local (Object > Relations > Make Local > All) and try again.",
    "overridden": "{objects} is a library override, where changes get lost: make it local "
    "(Object > Relations > Make Local > All) and try again.",
    "multi_user": "{objects} shares its mesh with {others}, which would change too: make it single user "
    "(Object > Relations > Make Single User > Object & Data) and try again.",
    "not_editable": "{objects} cannot be edited in this file: make it local (Object > Relations > Make Local > All).",
    "driven": "{name} of {objects} has a driver now, which would overwrite the value: remove the driver, or export "
    "the rig again.",
    "source_missing": "{name} is missing in {objects}: undo its removal, or export the rig again.",
    "mesh_changed": "{objects} has {now} vertices, but had {before} when the rig was exported: export the rig again.",
    "target_changed": "{objects} was changed or deleted meanwhile, so nothing was written: fit again.",
    "value_not_finite": "The value of {name} is not a finite number: nothing was written; fit again.",
    "value_out_of_limits": "The value {value} of {name} is outside its limits {minimum} to {maximum}: nothing was written; "
    "export the rig again if its slider range changed.",
    "parameter_unknown": "The rig spec has no parameter named {name}: use the spec that belongs to these values.",
    "write_lost": "{name} of {objects} did not keep the value that was written, so everything was put back: remove what "
    "overwrites it (a driver, an animation or a handler).",
    "bad_spec": "{path} is not a usable rig spec ({reason}): export the rig again.",
    "bad_rig_notes": "The custom property 'rigfit' of {objects} cannot be used ({reason}): correct or delete it.",
    "no_geometry": "{objects} has no faces after its modifiers: check the modifiers.",
}


class RigError(Exception):
    """A mistake the artist can mend. `kind` is a key of MESSAGES, `facts` fill its placeholders."""

    def __init__(self, kind: str, **facts: object) -> None:
        self.kind = kind
        self.facts = facts
        self.message = MESSAGES[kind].format(**facts)
        super().__init__(self.message)
