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
    "no_denoiser": "This Blender was built without a denoiser: render without one, or use Blender from blender.org.",
    "no_cycles": "This Blender was built without Cycles: use Blender from blender.org.",
    "render_failed": "Blender could not render ({reason}): try fewer pixels or samples.",
}


class RigError(Exception):
    """A mistake the artist can mend. `kind` is a key of MESSAGES, `facts` fill its placeholders."""

    def __init__(self, kind: str, **facts: object) -> None:
        self.kind = kind
        self.facts = facts
        self.message = MESSAGES[kind].format(**facts)
        super().__init__(self.message)
