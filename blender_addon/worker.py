# SPDX-License-Identifier: GPL-3.0-or-later
"""The headless request loop: JSON lines in on standard input, JSON lines out on standard output.

Runs as a script by its path, from any folder and under any folder name:

    python -P blender_addon/worker.py            (an interpreter with the bpy module)
    blender -b --factory-startup --python-exit-code 1 --python blender_addon/worker.py --

or inside a test through `serve`. Messages: docs/architecture.md, "Worker messages". The first line that counts is the
notification `hello`; what stands before it is Blender's own chatter. End of file on standard input means that the
parent is gone: the process ends, at once even in the middle of a render.

No bpy in here at import time: it is imported once the message stream is safe from what Blender prints.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

PROTOCOL = 1
PACKAGE = "blender_addon"

# How long a request in progress may go on after the parent has gone.
GRACE_AFTER_EOF_S = 0.5

Progress = Callable[[int, int, str], None]


# --- the message stream -----------------------------------------------------------------------------------------------


class MessageStream:
    """Writes one JSON object a line. numpy scalars and arrays become numbers and lists; NaN is refused."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def send(self, message: dict[str, Any]) -> None:
        """Raises ValueError (NaN) or TypeError (no JSON form) before anything is written."""
        line = json.dumps(message, allow_nan=False, default=_plain)
        self._sink.write(line.encode("ascii") + b"\n")
        self._sink.flush()

    def progress(self, done: int, total: int, text: str = "") -> None:
        self.send({"method": "progress", "params": {"done": int(done), "total": int(total), "text": str(text)}})


def _plain(value: object) -> object:
    for name in ("item", "tolist"):
        convert = getattr(value, name, None)
        if convert is not None and (name != "item" or getattr(value, "ndim", None) == 0):
            return convert()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """(requests, messages): private copies of standard input and output.

    File descriptor 1 becomes standard error and 0 the null device, so that nothing printed from Python or C, and no
    library that reads standard input, can reach the messages.
    """
    sys.stdout.flush()
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # Blender may have written a line without its end before this script began.
    messages.write(b"\n")
    return requests, messages


# --- the loop ---------------------------------------------------------------------------------------------------------


def serve(lines: Any, stream: MessageStream, handlers: dict[str, Callable[..., dict]] | None = None) -> None:
    """Answer every request of `lines` (an iterable of bytes) until it ends. No request can end the loop.

    Errors of the artist or of the request: {"kind", "message"} of a RigError. Anything else: kind "unexpected", with
    the traceback on standard error (the log).
    """
    if handlers is None:
        handlers = HANDLERS
    for line in lines:
        if not line.strip():
            continue
        request_id: object = None
        try:
            request = _decode(line)
            request_id = request.get("id")
            result = _call(handlers, request, stream.progress)
            stream.send({"id": request_id, "result": result})
        except Exception as error:
            stream.send({"id": request_id, "error": _describe(error)})
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _decode(line: bytes) -> dict[str, Any]:
    from .messages import RigError

    try:
        request = json.loads(line)
    except ValueError as error:
        raise RigError("bad_request", method="(none)", reason=f"it is not JSON, {error}") from None
    if not isinstance(request, dict):
        raise RigError("bad_request", method="(none)", reason="it is not a JSON object")
    return request


def _call(handlers: dict[str, Callable[..., dict]], request: dict[str, Any], progress: Progress) -> dict:
    import inspect

    from .messages import RigError

    method, params = request.get("method"), request.get("params", {})
    if not isinstance(method, str) or not isinstance(params, dict):
        raise RigError("bad_request", method=method, reason="method must be a string and params an object")
    handler = handlers.get(method)
    if handler is None:
        raise RigError("bad_request", method=method, reason=f"there is no such method; known: {', '.join(handlers)}")
    signature = inspect.signature(handler)
    if "progress" in params:
        raise RigError("bad_request", method=method, reason="progress is not a parameter")
    extra = {"progress": progress} if "progress" in signature.parameters else {}
    try:
        signature.bind(**params, **extra)
    except TypeError as error:
        raise RigError("bad_request", method=method, reason=str(error)) from None
    for name, value in params.items():
        _check_type(method, name, value)
    return handler(**params, **extra)


# The JSON types of the parameters that every method shares by name; None is allowed where the method's default is None.
_PARAMETER_TYPES: dict[str, tuple[type, ...]] = {
    "path": (str,),
    "out": (str,),
    "spec": (str,),
    "description": (str,),
    "metres_per_unit": (int, float),
    "objects": (list, type(None)),
    "hide": (list, type(None)),
    "values": (dict,),
    "camera": (dict,),
    "light": (dict, type(None)),
    "background": (list, type(None)),
    "samples": (int,),
    "seed": (int,),
    "start": (int,),
    "count": (int,),
    "width": (int,),
    "height": (int,),
    "threads": (int, type(None)),
    "pairs": (bool,),
    "transparent": (bool,),
    "denoise": (bool,),
    "subsurface": (bool,),
    "gpu": (bool,),
}


def _check_type(method: str, name: str, value: object) -> None:
    from .messages import RigError

    wanted = _PARAMETER_TYPES.get(name)
    if wanted is None:
        return
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
        raise RigError("bad_request", method=method, reason=f"{name} must be {names}, not {type(value).__name__}")
    if name in ("objects", "hide") and value is not None and not all(isinstance(item, str) for item in value):  # type: ignore[union-attr]
        raise RigError("bad_request", method=method, reason=f"{name} must be a list of object names")


def _describe(error: Exception) -> dict[str, str]:
    from .messages import RigError

    if isinstance(error, RigError):
        return {"kind": error.kind, "message": error.message}
    traceback.print_exception(error)
    return {"kind": "unexpected", "message": f"{type(error).__name__}: {error}"}


# --- the methods ------------------------------------------------------------------------------------------------------


def ping() -> dict:
    """Versions of this process."""
    import bpy
    import numpy

    return {
        "blender_version": bpy.app.version_string,
        "python_version": sys.version.split()[0],
        "numpy_version": numpy.__version__,
        "pid": os.getpid(),
    }


def file_open(path: str) -> dict:
    """Open a .blend file. -> {"objects": names of its mesh objects}. Scripts in the file are not run.

    RigError file_missing, file_unreadable, file_newer (after which an empty scene is open).
    """
    import bpy

    from .messages import RigError

    if not os.path.isfile(path):
        raise RigError("file_missing", path=path)
    try:
        bpy.ops.wm.open_mainfile(filepath=os.path.abspath(path), load_ui=False, use_scripts=False)
    except RuntimeError as error:
        reason = _reason(error)
        if "newer version" in reason:
            raise RigError("file_newer", path=path, saved="its file format", running=bpy.app.version_string) from None
        raise RigError("file_unreadable", path=path, reason=reason) from None
    saved, running = tuple(bpy.data.version)[:2], tuple(bpy.app.version)[:2]
    if saved > running:
        file_new()
        raise RigError("file_newer", path=path, saved=_dotted(saved), running=_dotted(running))
    return {"objects": [item.name for item in bpy.context.scene.objects if item.type == "MESH"]}


def file_new() -> dict:
    """An empty scene with factory settings."""
    import bpy

    bpy.ops.wm.read_factory_settings(use_empty=True)
    return {}


def file_append(path: str, objects: list[str], metres_per_unit: float = 1.0) -> dict:
    """The named objects of a library file, with all they use, in an otherwise empty scene. -> {"objects": their names}.

    metres_per_unit: of the scene that they come from. Scripts in the file are not run.
    RigError file_missing, file_unreadable, file_newer, object_missing (after which an empty scene is open).
    """
    import math

    import bpy

    from .messages import RigError

    if not (math.isfinite(metres_per_unit) and metres_per_unit > 0):
        raise RigError("bad_request", method="file.append", reason="metres_per_unit must be above 0")
    if not os.path.isfile(path):
        raise RigError("file_missing", path=path)
    file_new()
    scene = bpy.context.scene
    scene.unit_settings.system = "METRIC"
    scene.unit_settings.scale_length = metres_per_unit
    try:
        with bpy.data.libraries.load(os.path.abspath(path), link=False) as (source, target):
            present = set(source.objects)
            target.objects = [name for name in objects if name in present]
    except (OSError, RuntimeError) as error:
        raise RigError("file_unreadable", path=path, reason=_reason(error)) from None
    saved = max((tuple(library.version)[:2] for library in bpy.data.libraries), default=(0, 0))
    running = tuple(bpy.app.version)[:2]
    missing = [name for name in objects if name not in present]
    if saved > running:
        file_new()
        raise RigError("file_newer", path=path, saved=_dotted(saved), running=_dotted(running))
    if missing:
        file_new()
        raise RigError("object_missing", objects=", ".join(missing))
    for item in target.objects:
        scene.collection.objects.link(item)
    bpy.context.view_layer.update()
    return {"objects": [item.name for item in target.objects]}


def file_save(path: str) -> dict:
    """Save a compressed copy; the open file keeps its own path. RigError file_unwritable; nothing half-written."""
    import bpy

    from .messages import RigError

    path = os.path.abspath(path)
    temporary = os.path.join(os.path.dirname(path), f".rigfit-{os.getpid()}.tmp.blend")
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "it is a folder")
        # Blender says in a roundabout way why it cannot write; the system says it in two words.
        with open(temporary, "xb"):
            pass
        os.unlink(temporary)
        try:
            bpy.ops.wm.save_as_mainfile(filepath=temporary, copy=True, compress=True, check_existing=False)
        except RuntimeError as error:
            raise OSError(5, _reason(error)) from None
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RigError("file_unwritable", path=path, reason=error.strerror or str(error)) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return {}


def head_build(description: str) -> dict:
    """The default head of a head description (.npz of rigfit.rig.default_head) in an empty scene."""
    from .rig.default_head import build_default_head

    file_new()
    return {"object": build_default_head(description).name}


def rig_export(out: str, progress: Progress, objects: list[str] | None = None, pairs: bool = True) -> dict:
    """Write the rig spec of the open rig; see `rig.export.export_rig`."""
    from .rig.export import export_rig

    return export_rig(out, objects=objects, pairs=pairs, progress=progress)


def rig_apply(spec: str, values: dict[str, float], objects: list[str] | None = None) -> dict:
    """Write parameter values to the open rig; see `rig.parameters.apply_parameters`."""
    from .rig.parameters import apply_parameters

    return apply_parameters(spec, values, objects=objects)


def rig_read(spec: str, objects: list[str] | None = None) -> dict:
    """Read parameter values from the open rig; see `rig.parameters.read_parameters`."""
    from .rig.parameters import read_parameters

    return read_parameters(spec, objects=objects)


def studio_sample(spec: str, seed: int, start: int, count: int, out: str, width: int = 512, height: int = 512) -> dict:
    """Samples start … start+count−1 of a seed for a rig spec; see `studio.sampling.write_samples`."""
    from .studio.sampling import write_samples

    return write_samples(spec, seed=seed, start=start, count=count, out=out, width=width, height=height)


def studio_render(
    camera: dict,
    out: str,
    light: dict | None = None,
    background: list | None = None,
    samples: int = 16,
    seed: int = 0,
    hide: list[str] | None = None,
    objects: list[str] | None = None,
    transparent: bool = False,
    denoise: bool = False,
    subsurface: bool = True,
    gpu: bool = False,
    threads: int | None = None,
) -> dict:
    """PNG of the open rig through a camera; see `studio.render.render`."""
    from .studio.render import render

    return render(
        camera,
        out,
        light=light,
        background=background,
        samples=samples,
        seed=seed,
        hide=hide,
        objects=objects,
        transparent=transparent,
        denoise=denoise,
        subsurface=subsurface,
        gpu=gpu,
        threads=threads,
    )


HANDLERS: dict[str, Callable[..., dict]] = {
    "ping": ping,
    "file.open": file_open,
    "file.new": file_new,
    "file.append": file_append,
    "file.save": file_save,
    "head.build": head_build,
    "rig.export": rig_export,
    "rig.apply": rig_apply,
    "rig.read": rig_read,
    "studio.sample": studio_sample,
    "studio.render": studio_render,
}


def _reason(error: Exception) -> str:
    """Blender's own words without the prefix 'Error:' and without line ends."""
    lines = [line.removeprefix("Error: ").strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else "no reason given"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


# --- the process ------------------------------------------------------------------------------------------------------


def _watched_lines(requests: BinaryIO) -> Any:
    """The lines of `requests`; ends the process soon after end of file, even while a request is being served.

    The one thread of this process: it reads a pipe and, at the end, leaves; it never touches Blender's data, which is
    what makes threads crash Blender. Without it a render would go on for minutes after its parent was killed.
    """
    import queue
    import threading

    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(line)
        waiting.put(None)
        time.sleep(GRACE_AFTER_EOF_S)
        _leave_now()

    threading.Thread(target=read, name="rigfit-requests", daemon=True).start()
    while (line := waiting.get()) is not None:
        yield line


def _leave_now() -> None:
    """End the process without Blender's own clean-up, which waits for the render; its temporary folder goes too."""
    import shutil

    bpy = sys.modules.get("bpy")
    folder = getattr(getattr(bpy, "app", None), "tempdir", "")
    if folder and os.path.basename(os.path.normpath(folder)).startswith("blender_"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def run(requests: BinaryIO, messages: BinaryIO) -> None:
    """Say hello with an empty scene and serve until end of file; called by the script part below."""
    stream = MessageStream(messages)
    try:
        import bpy  # noqa: F401
        import numpy  # noqa: F401  some distributions package Blender without it
    except ImportError as error:
        stream.send({"method": "hello", "params": {"protocol": PROTOCOL, "import_error": str(error)}})
        raise SystemExit(1) from error
    # Not Blender's cube, which would be rendered by whoever forgets to open a file.
    file_new()
    stream.send({"method": "hello", "params": {"protocol": PROTOCOL, **ping()}})
    serve(_watched_lines(requests), stream)


def _load_package() -> Any:
    """This file's package under the name `blender_addon`, whatever its folder is called, without touching sys.path."""
    import importlib
    import importlib.util

    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{PACKAGE}.worker")


if __name__ == "__main__":
    _streams = take_streams()
    _load_package().run(*_streams)
