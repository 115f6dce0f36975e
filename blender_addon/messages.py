# SPDX-License-Identifier: GPL-3.0-or-later
"""Every error kind of the add-on and its one sentence with the fix. No bpy in here."""

from __future__ import annotations

MESSAGES: dict[str, str] = {
    "no_selection": "Nothing is selected: select the head mesh (or meshes) of the rig and try again.",
    "no_shape_keys": "{objects} has no shape keys to fit: select a mesh with shape keys, or add some.",
    "file_missing": "There is no file {path}: check the name.",
    "file_unreadable": "{path} cannot be opened as a .blend file ({reason}): save it again from Blender.",
    "file_unwritable": "{path} cannot be written ({reason}): choose another folder.",
}


class RigError(Exception):
    """A mistake the artist can mend. `kind` is a key of MESSAGES, `facts` fill its placeholders."""

    def __init__(self, kind: str, **facts: object) -> None:
        self.kind = kind
        self.facts = facts
        self.message = MESSAGES[kind].format(**facts)
        super().__init__(self.message)
