# SPDX-License-Identifier: GPL-3.0-or-later
"""A fit from click to applied weights, and the check render after it, as steps for `link.flow`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import bpy
import numpy as np

from ..link.flow import Call, Steps
from ..messages import RigError
from ..rig.export import export_steps
from ..rig.parameters import apply_parameters, hold, put_back, read_parameters, read_spec, spec_parameters
from .status import Check, Result, Status, read_fit
from .target import Mark, mark, require_unchanged, why_not

GROUPS = {"both": ("identity", "expression"), "identity": ("identity",), "expression": ("expression",)}
UNDO_NAME = "Fit from Photo"


@dataclass(frozen=True)
class Request:
    """What the artist asked for. blender: the program that renders for the backend. gpu: it may use one."""

    photos: tuple[str, ...]
    solve: str = "both"
    locks: frozenset[str] = frozenset()
    face: int = 0
    focal_mm: float | None = None
    strength: float = 1.0
    blender: str = ""
    gpu: bool = True


@dataclass(frozen=True)
class Fitted:
    """A finished fit. blobs: pictures by name ("photo_0", "landmarks_0", …), uint8 (H,W,3)."""

    result: Result
    blobs: dict[str, np.ndarray]


# --- the fit ------------------------------------------------------------------------------------------------------------


def fit_steps(request: Request, objects: Sequence[bpy.types.Object], folder: str, status: Status) -> Steps:
    """Read the rig, have the photos fitted, write the values, push one undo step; returns `Fitted`.

    folder: for files between the two processes. RigError; then the rig is as it was.
    """
    started = time.perf_counter()
    for photo in request.photos:
        if not os.path.isfile(photo):
            raise RigError("photo_missing", path=photo)
    marks = mark(objects)
    names = [item.name for item in marks]
    spec = os.path.join(folder, "rig.npz")
    told = yield from export_steps(spec, names, scratch=True)
    document = read_spec(spec)
    yield None
    wanted = _wanted(request, document)
    params = _fit_params(request, told["rig_hash"], spec, document)
    call = Call("fit", params, "Looking at the photo")
    try:
        answer = yield call
    except RigError as error:
        if error.kind != "unknown_rig":
            raise
        yield from _register(request, spec, marks, document, folder)
        answer = yield call
    rows, photos, notes = read_fit(answer.result.get("fit", {}))
    fitted = {row.name: row.value for row in rows if row.name in wanted}
    if set(fitted) != wanted:
        raise RigError("bad_answer", reason="it is about other parameters")
    status.say(1, 1, "Writing the values")
    yield None
    result = Result(
        spec=spec,
        fit_id=str(answer.result.get("fit_id", "")),
        objects=names,
        fitted=fitted,
        before={},
        held=[],
        rows=rows,
        photos=photos,
        notes=[*document.get("warnings", []), *notes],
        left_out=[f"{item['name']}: {item['reason']}" for item in document.get("left_out", [])],
        strength=request.strength,
    )
    # From here on without a pause: what was before is what the fit replaces, the undo step belongs to the values, and a
    # fit that was cancelled wrote nothing.
    _require_writable(marks)
    result.before = {name: value for name, value in read_parameters(spec)["values"].items() if name in fitted}
    result.held = hold(spec, list(fitted))
    written = apply_parameters(spec, result.values(request.strength))
    push_undo(UNDO_NAME)
    result.notes += written["warnings"]
    result.seconds = time.perf_counter() - started
    return Fitted(result, answer.blobs)


def _wanted(request: Request, document: dict[str, Any]) -> set[str]:
    """The parameters that the fit may write. RigError all_locked."""
    groups = GROUPS[request.solve]
    wanted = {p.name for p in spec_parameters(document) if p.group in groups and p.name not in request.locks}
    if not wanted:
        raise RigError("all_locked")
    return wanted


def _fit_params(request: Request, rig_hash: str, spec: str, document: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the request; what is locked or not asked for stays at the value that the rig has now."""
    now = read_parameters(spec)["values"]
    fixed = {}
    for p in spec_parameters(document):
        other_group = p.group in GROUPS["both"] and p.group not in GROUPS[request.solve]
        if (p.name in request.locks or other_group) and p.name in now:
            fixed[p.name] = min(max(float(now[p.name]), p.minimum), p.maximum)
    photos: list[dict[str, Any]] = [{"path": path} for path in request.photos]
    if request.face:
        photos[0]["face"] = request.face
    params: dict[str, Any] = {"rig_hash": rig_hash, "photos": photos, "solve": request.solve, "locks": fixed}
    if request.focal_mm is not None:
        params["focal_mm"] = request.focal_mm
    return params


def _register(request: Request, spec: str, marks: Sequence[Mark], document: dict[str, Any], folder: str) -> Steps:
    """Make the rig known to the backend; the first time, it looks for the landmarks on a copy of it."""
    try:
        yield Call("rig.register", {"spec": spec}, "Reading the rig")
        return
    except RigError as error:
        if error.kind != "needs_blend":
            raise
    params = {"spec": spec, **_copy_for_backend(marks, document, folder, request)}
    yield Call("rig.register", params, "Finding the landmarks on the rig (once for each rig)")


def _copy_for_backend(marks: Sequence[Mark], document: dict[str, Any], folder: str, request: Request) -> dict[str, Any]:
    """Write the meshes with all they use to a library file; the parameters that tell the backend of it."""
    path = os.path.join(folder, "rig.blend")
    objects = require_unchanged(marks)
    try:
        bpy.data.libraries.write(path, set(objects), path_remap="ABSOLUTE", compress=False)
    except (OSError, RuntimeError) as error:
        raise RigError("file_unwritable", path=path, reason=" ".join(str(error).split())) from None
    params = {
        "blend": path,
        "objects": [item.name for item in marks],
        "metres_per_unit": float(document.get("metres_per_unit", 1.0)),
    }
    if request.blender:
        params["blender"] = request.blender
    return params


def _require_writable(marks: Sequence[Mark]) -> None:
    """The target again, at the last moment. RigError with the first reason."""
    reasons = why_not(require_unchanged(marks))
    if reasons:
        raise reasons[0].error()


# --- the check ------------------------------------------------------------------------------------------------------------


def check_steps(request: Request, result: Result, folder: str) -> Steps:
    """Have a headless Blender render the result as the photo saw it; returns (Check, blobs "render" and "over")."""
    yield None
    document = read_spec(result.spec)
    names = {mesh["object"] for mesh in document["meshes"]}
    marks = mark([obj for obj in bpy.context.scene.objects if obj.name in names])
    params = {
        "fit_id": result.fit_id,
        "values": result.values(result.strength),
        "gpu": request.gpu,
        "spec": result.spec,
    }
    params |= _copy_for_backend(marks, document, folder, request)
    answer = yield Call("verify", params, "Blender renders the check")
    percent = answer.result.get("landmark_error_percent")
    check = Check(
        bool(answer.result.get("face_found")),
        None if percent is None else float(percent),
        float(answer.result.get("seconds", 0.0)),
    )
    return check, answer.blobs


# --- keeping and reverting ----------------------------------------------------------------------------------------------


def apply_strength(result: Result, strength: float) -> None:
    """Write the fit again with another strength. RigError; then the rig is as it was."""
    apply_parameters(result.spec, result.values(strength))
    result.strength = strength


def revert(result: Result) -> list[str]:
    """Put every number back to what it was before the fit, as one undo step; names of what is gone."""
    lost = put_back(result.held)
    push_undo(f"Revert {UNDO_NAME}")
    return lost


def is_applied(result: Result) -> bool | None:
    """Does the rig show the fit now? None if neither the fit nor what was before (the artist went on, or it is gone)."""
    try:
        now = read_parameters(result.spec)["values"]
    except RigError:
        return None
    wanted = result.values(result.strength)
    if not wanted.keys() <= now.keys():
        return None
    names = list(wanted)
    current = np.array([now[name] for name in names], np.float32)
    if np.allclose(current, np.array([wanted[n] for n in names], np.float32), atol=1e-5):
        return True
    before = np.array([result.before.get(n, np.nan) for n in names], np.float32)
    return False if np.allclose(current, before, atol=1e-5) else None


def push_undo(name: str) -> None:
    """One undo step. Timers have no window of their own; background mode makes its undo stack at the first push."""
    manager = bpy.context.window_manager
    window = bpy.context.window or (manager.windows[0] if manager is not None and len(manager.windows) else None)
    with bpy.context.temp_override(window=window) if window is not None else nullcontext():
        bpy.ops.ed.undo_push(message=name)
