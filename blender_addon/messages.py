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
    "no_photo": "There is no photo in the list: add one.",
    "photo_missing": "There is no photo {path}: remove it from the list, or add it again from where it is now.",
    "all_locked": "Every parameter that the fit may move is locked: unlock some.",
    "bad_answer": "The backend's answer cannot be used ({reason}): install the backend again, so that it fits this add-on.",
    "cancelled": "It was cancelled; nothing was written.",
    "defect": "Something went wrong that should not ({reason}): copy the report and send it to the developers.",
    "backend_missing": "The backend is not installed yet: press Install Backend.",
    "backend_not_there": "There is no backend at {path}: correct the path in the preferences, or empty it.",
    "offline": "Blender may not go online: tick Preferences > System > Network > Allow Online Access, then install again.",
    "wheel_missing": "This copy of the add-on carries no backend ({path}): install the add-on from its zip file, or name an "
    "environment with rigfit in the preferences.",
    "no_python": "The backend needs Python 3.11 or 3.12, and none was found: install it from python.org, then press "
    "Install Backend again.",
    "disk_full": "There is not enough room in {path}: {needed} GB are needed, {free} GB are free.",
    "no_network": "The package index does not answer: check the network, then press Install Backend again (log: {log}).",
    "install_failed": "The backend could not be installed ({reason}): the log {log} says more.",
    "backend_not_started": "The backend could not be started ({reason}): install it again in the preferences.",
    "backend_start_ended": "The backend ended while it was starting ({reason}): install it again in the preferences "
    "(log: {log}).",
    "backend_start_slow": "The backend was not ready after {seconds} s: try again; if that does not help, see {log}.",
    "backend_bad_address": "The backend wrote an address that cannot be used ({reason}): install it again in the preferences.",
    "backend_unreachable": "The backend cannot be reached ({reason}): let the firewall allow connections to 127.0.0.1, then "
    "try again.",
    "backend_no_hello": "The backend did not say hello as it should ({reason}): try again; if that does not help, see {log}.",
    "backend_protocol": "The backend speaks protocol {theirs} and this add-on protocol {ours}: install the backend again in "
    "the preferences, so that it fits this add-on.",
    "backend_proof": "What answered is not the backend that was started, so nothing was sent to it: try again.",
    "backend_in_use": "Another Blender is connected to this backend: close it there, or empty Attach in the preferences.",
    "backend_broken": "The backend sent something that cannot be read ({reason}): try again, or install it again in the "
    "preferences.",
    "backend_died": "The backend ended in the middle of its work ({reason}): try again; if that does not help, see {log}.",
    "attach_missing": "There is no file {path} to attach to: start `rigfit serve --attach --address-file` with it, or empty "
    "Attach in the preferences.",
    "attach_unsafe": "{path} is not safe to attach to ({reason}): let `rigfit serve --attach` write it again, for you alone.",
    "attach_bad": "{path} does not say where a backend is ({reason}): let `rigfit serve --attach` write it again.",
    "no_geometry": "{objects} has no faces after its modifiers: check the modifiers.",
}


class RigError(Exception):
    """A mistake the artist can mend. `kind` is a key of MESSAGES, `facts` fill its placeholders."""

    def __init__(self, kind: str, **facts: object) -> None:
        self.kind = kind
        self.facts = facts
        self.message = MESSAGES[kind].format(**facts)
        super().__init__(self.message)


class BackendError(RigError):
    """A mistake the artist can mend, in the backend's own words: neither kind nor sentence stands in MESSAGES."""

    def __init__(self, kind: str, message: str, **facts: object) -> None:
        self.kind = kind
        self.facts = facts
        self.message = message
        Exception.__init__(self, message)
