# SPDX-License-Identifier: Apache-2.0
"""Blender as a child process: found, started, spoken to, and ended, whatever goes wrong.

Faults of the message stream are made by small Python children that take Blender's place; the tests marked `blender`
start the real one that RIGFIT_BLENDER names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from rigfit.blender import locate as locate_module
from rigfit.blender.locate import Blender, addon_folder, locate, missing_library_message
from rigfit.blender.worker import BlenderWorker, command_line
from rigfit.errors import UserError

posix_only = pytest.mark.skipif(os.name != "posix", reason="shell scripts stand for programs")

CAMERA = {
    "width": 24,
    "height": 16,
    "focal_px": 40.0,
    "principal_px": [12, 8],
    "rotation": [[1, 0, 0], [0, 0, -1], [0, 1, 0]],
    "translation": [0, 0, 1],
}


def program(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def child(text: str) -> list[str]:
    """Command line of a child that runs `text`; `say` sends a message, `requests` iterates over what comes in."""
    start = """
        import json, os, sys, time
        def say(**message): print(json.dumps(message), flush=True)
        requests = (json.loads(line) for line in sys.stdin)
        hello = {"protocol": 1, "blender_version": "4.5.0"}
    """
    return [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(text)]


def ended(pid: int, within_s: float) -> bool:
    """Whether a process (not our child) is gone, or a zombie, within some time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


# --- locate -----------------------------------------------------------------------------------------------------------


@posix_only
def test_an_executable_is_found_by_option_variable_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr(locate_module.importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "Blender 4.3 äö"
    folder.mkdir()
    there = program(folder / "blender", "echo 'Blender 4.3.2 (hash abc)'; echo '  build date: 2025'")
    wanted = Blender("executable", there, "4.3.2")
    assert locate(there, environment={}) == wanted
    assert locate(folder, environment={}) == wanted
    assert locate(environment={"RIGFIT_BLENDER": str(there)}) == wanted
    assert locate(environment={"PATH": str(folder)}) == wanted
    other = program(tmp_path / "other", "echo Blender 5.0.1")
    assert locate(other, environment={"RIGFIT_BLENDER": str(there), "PATH": str(folder)}).version == "5.0.1"


def test_bpy_in_this_interpreter_is_found_without_importing_it(monkeypatch):
    monkeypatch.setattr(locate_module.importlib.util, "find_spec", lambda name: object() if name == "bpy" else None)
    monkeypatch.setattr(locate_module.importlib.metadata, "version", lambda name: "4.5.3")
    assert locate(environment={}) == Blender("bpy", Path(sys.executable), "4.5.3")
    monkeypatch.setattr(locate_module.importlib.metadata, "version", lambda name: "4.1.0")
    with pytest.raises(UserError, match=r"4\.1\.0 .* too old"):
        locate(environment={})


@posix_only
@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("echo Blender 4.1.1", "blender_too_old", "4.2 is the oldest"),
        ("echo Blender 3.4.1", "blender_too_old", "4.2 is the oldest"),
        ("echo GIMP 2.10", "no_blender", "neither Blender nor a Python"),
        ("echo Python 3.12.1; exit 3", "no_blender", "has no bpy module"),
        ("exit 1", "no_blender", "neither"),
        (
            "echo 'blender: error while loading shared libraries: libXrender.so.1: cannot open shared object file: "
            "No such file or directory' >&2; exit 127",
            "blender_cannot_start",
            "libxrender1",
        ),
    ],
)
def test_what_is_no_usable_blender_is_refused_in_one_sentence(tmp_path, script, kind, words):
    there = program(tmp_path / "blender", script)
    with pytest.raises(UserError, match=words) as caught:
        locate(there, environment={})
    assert caught.value.kind == kind
    assert "\n" not in caught.value.message


def test_a_named_blender_that_is_missing_is_an_error_even_if_another_is_there(tmp_path):
    with pytest.raises(UserError, match="--blender") as caught:
        locate(tmp_path / "nothing", environment={"PATH": os.environ["PATH"]})
    assert caught.value.kind == "no_blender"
    with pytest.raises(UserError, match="RIGFIT_BLENDER"):
        locate(environment={"RIGFIT_BLENDER": str(tmp_path)})
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    with pytest.raises(UserError, match="cannot be started"):
        locate(plain, environment={})


def test_no_blender_at_all_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(locate_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rigfit\[blender\].*--blender") as caught:
        locate(environment={"PATH": ""})
    assert caught.value.kind == "no_blender"


def test_this_python_without_bpy_is_refused(monkeypatch):
    if locate_module.importlib.util.find_spec("bpy") is not None:
        pytest.skip("bpy is installed here")
    with pytest.raises(UserError, match="has no bpy module"):
        locate(sys.executable, environment={})


def test_missing_libraries_are_named_with_their_packages():
    said = "ImportError: libSM.so.6: cannot open shared object file: No such file or directory"
    message = missing_library_message(said)
    assert message is not None
    assert "libSM.so.6" in message
    assert {"libsm6", "libxi6", "libxkbcommon0", "libegl1"} <= set(message.replace("`", " ").split())
    strange = missing_library_message("libfoo-2.so.3: cannot open shared object file")
    assert strange is not None
    assert "libfoo-2.so.3" in strange.rpartition("package")[2]
    assert missing_library_message("libSM.so.6 loaded") is None


def test_the_add_on_is_found_in_the_checkout():
    assert (addon_folder() / "worker.py").is_file()
    assert (addon_folder() / "studio" / "render.py").is_file()


def test_command_lines():
    script = str(addon_folder() / "worker.py")
    assert command_line(Blender("bpy", Path("/x/python"), "")) == ["/x/python", "-P", script]
    line = command_line(Blender("executable", Path("/x/blender"), "4.3.2"))
    assert line.index("--python-exit-code") < line.index("--python")
    assert "--factory-startup" in line


# --- the parent's side of the stream ----------------------------------------------------------------------------------


def test_requests_replies_progress_and_chatter_before_the_hello():
    command = child("""
        print("Blender 9.9 (hash)"); print('{"looks": "like json"}')
        say(method="hello", params=hello)
        for request in requests:
            for done in range(3): say(method="progress", params={"done": done, "total": 3, "text": "half way"})
            say(id=request["id"], result=request)
    """)
    seen = []
    with BlenderWorker(command=command) as worker:
        assert worker.hello["blender_version"] == "4.5.0"
        got = worker.call("echo", progress=lambda *said: seen.append(said), path=Path("/ä"), none=None, n=1)
        assert got == {"id": 1, "method": "echo", "params": {"path": "/ä", "n": 1}}
        assert worker.call("again")["id"] == 2
        log = worker.log_path
    assert seen == [(0, 3, "half way"), (1, 3, "half way"), (2, 3, "half way")]
    assert log is not None
    assert not log.exists()
    with pytest.raises(UserError, match="not running"):
        worker.call("echo")


def test_errors_become_user_errors_and_defects_runtime_errors_with_the_log():
    command = child("""
        say(method="hello", params=hello)
        for request in requests:
            kind = request["params"]["kind"]
            if kind == "unexpected": print("Traceback: line 7", file=sys.stderr, flush=True)
            say(id=request["id"], error={"kind": kind, "message": "Do this."})
    """)
    with BlenderWorker(command=command) as worker:
        with pytest.raises(UserError) as caught:
            worker.call("x", kind="file_missing")
        assert (caught.value.kind, caught.value.message) == ("file_missing", "Do this.")
        with pytest.raises(RuntimeError, match=r"(?s)Do this\..*line 7"):
            worker.call("x", kind="unexpected")
        log = worker.log_path
    assert log is not None
    assert log.exists(), "the log of a defect is kept"
    log.unlink()


def test_a_child_that_dies_is_reported_with_its_last_words():
    command = child("""
        say(method="hello", params=hello)
        next(requests)
        print("Writing crash file", file=sys.stderr, flush=True)
        os.abort()
    """)
    with BlenderWorker(command=command) as worker:
        with pytest.raises(UserError, match=r"(?s)stopped during studio\.render.*crash file") as caught:
            worker.call("studio.render")
        assert caught.value.kind == "blender_died"
        if os.name == "posix":
            assert "SIGABRT" in caught.value.message
        assert worker.pid is None
        with pytest.raises(UserError, match="not running"):
            worker.call("ping")
        log = worker.log_path
    assert log is not None
    assert log.exists()
    log.unlink()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("print('no good', file=sys.stderr); sys.exit(4)", "blender_cannot_start", "no good"),
        (
            "print('ImportError: libXi.so.6: cannot open shared object file: No such file', file=sys.stderr)",
            "blender_cannot_start",
            "libxi6",
        ),
        (
            'say(method="hello", params={"protocol": 1, "import_error": "No module named \'numpy\'"})',
            "blender_cannot_start",
            "python3-numpy",
        ),
        ('say(method="hello", params={**hello, "protocol": 2})', "bad_protocol", "another version"),
        ('say(method="hello", params={**hello, "blender_version": "4.1.0"})', "blender_too_old", "too old"),
    ],
)
def test_a_child_that_cannot_start_is_reported(text, kind, words):
    worker = BlenderWorker(command=child(text))
    with pytest.raises(UserError, match=words) as caught:
        worker.start()
    assert caught.value.kind == kind
    assert worker.pid is None
    if worker.log_path is not None:
        worker.log_path.unlink(missing_ok=True)


def test_a_program_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot be started"):
        BlenderWorker(command=[str(tmp_path / "none")]).start()


def test_garbage_on_the_stream_ends_the_child():
    command = child("""
        say(method="hello", params=hello)
        next(requests); print("Fra:1 Mem:9M"); sys.stdout.flush(); time.sleep(60)
    """)
    with BlenderWorker(command=command) as worker:
        with pytest.raises(RuntimeError, match="broke the protocol"):
            worker.call("ping")
        assert worker.pid is None
        log = worker.log_path
    assert log is not None
    log.unlink()


def test_a_call_that_takes_too_long_ends_the_child():
    command = child("""
        say(method="hello", params=hello)
        next(requests); time.sleep(60)
    """)
    with BlenderWorker(command=command) as worker:
        pid = worker.pid
        started = time.monotonic()
        with pytest.raises(UserError, match="in time") as caught:
            worker.call("studio.render", timeout_s=0.3)
        assert caught.value.kind == "blender_timeout"
        assert time.monotonic() - started < 10
        assert worker.pid is None
        log = worker.log_path
    assert pid is not None
    assert ended(pid, 5)
    assert log is not None
    log.unlink()


@posix_only
def test_a_child_that_ignores_the_end_of_its_input_is_killed_with_its_own_children(monkeypatch):
    monkeypatch.setattr("rigfit.blender.worker.CLOSE_TIMEOUT_S", 0.3)
    command = child("""
        import subprocess
        inner = subprocess.Popen(["sleep", "60"])
        say(method="hello", params={**hello, "inner": inner.pid})
        time.sleep(60)
    """)
    started = time.monotonic()
    with BlenderWorker(command=command) as worker:
        pids = worker.pid, worker.hello["inner"]
    assert time.monotonic() - started < 20
    assert all(pid is not None and ended(pid, 5) for pid in pids)


@posix_only
def test_ctrl_c_ends_the_child_and_goes_on():
    command = child("""
        say(method="hello", params=hello)
        next(requests); os.kill(os.getppid(), 2); time.sleep(60)
    """)
    worker = BlenderWorker(command=command)
    worker.start()
    pid = worker.pid
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.call("studio.render")
    finally:
        signal.signal(signal.SIGINT, before)
    assert pid is not None
    assert ended(pid, 5)
    worker.close()


# --- recycling --------------------------------------------------------------------------------------------------------

# Keeps what Blender would keep, and tells it on request.
MEMORY = """
    say(method="hello", params=hello)
    scene, values = None, {}
    for request in requests:
        method, params = request["method"], request["params"]
        if method in ("file.open", "file.new", "head.build"): scene, values = [method, params], {}
        if method == "rig.apply": values.update(params["values"])
        say(id=request["id"], result={"pid": os.getpid(), "scene": scene, "values": values})
"""


def test_recycling_brings_the_scene_and_the_values_back():
    with BlenderWorker(command=child(MEMORY), recycle_after=2) as worker:
        worker.call("file.open", path="old.blend")
        worker.call("rig.apply", spec="s", values={"lost": 1.0})
        first = worker.call("file.open", path="head.blend")
        worker.call("rig.apply", spec="s", values={"a": 0.1, "b": 0.2})
        worker.call("rig.apply", spec="s", values={"a": 0.3})
        for _ in range(2):
            assert worker.call("studio.render")["pid"] == first["pid"]
        assert worker.call("rig.read")["pid"] == first["pid"], "only renders and what comes before them restart"
        after = worker.call("studio.render")
        assert after["pid"] != first["pid"]
        assert after["scene"] == ["file.open", {"path": "head.blend"}]
        assert after["values"] == {"a": 0.3, "b": 0.2}
        worker.call("studio.render")
        assert worker.call("rig.apply", spec="s", values={"a": 0.5})["values"] == {"a": 0.5, "b": 0.2}
        assert worker.restarts == 2


def test_recycle_after_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        BlenderWorker(recycle_after=0)


# --- the child's side of the stream -----------------------------------------------------------------------------------


def served(*lines: str | bytes, **handlers) -> list[dict]:
    from blender_addon.worker import MessageStream, serve

    sink = io.BytesIO()
    serve([line.encode() if isinstance(line, str) else line for line in lines], MessageStream(sink), handlers)
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_nothing_that_comes_in_ends_the_loop(capsys):
    from blender_addon.messages import RigError

    def missing(path: str) -> dict:
        raise RigError("file_missing", path=path)

    def defect() -> dict:
        raise ZeroDivisionError("oops")

    replies = served(
        "not json",
        b"\xff\xfe\n",
        "[1, 2]",
        "{}",
        '{"id": 1, "method": "ping", "params": [1]}',
        '{"id": 2, "method": "nothing"}',
        '{"id": 3, "method": "missing"}',
        '{"id": 4, "method": "missing", "params": {"path": 7}}',
        '{"id": 5, "method": "missing", "params": {"path": "a", "more": 1}}',
        '{"id": 6, "method": "missing", "params": {"path": "a"}}',
        '{"id": 7, "method": "defect"}',
        '{"id": 8, "method": "nan"}',
        '{"id": 9, "method": "strange"}',
        '{"id": 10, "method": "ping", "params": {"progress": 1}}',
        "",
        '{"id": 11, "method": "ping"}',
        missing=missing,
        defect=defect,
        nan=lambda: {"x": float("nan")},
        strange=lambda: {"x": object()},
        ping=lambda: {"ok": True},
    )
    assert [reply.get("id") for reply in replies] == [None, None, None, None, *range(1, 12)]
    kinds = [reply.get("error", {}).get("kind") for reply in replies]
    assert kinds == ["bad_request"] * 9 + [
        "file_missing",
        "unexpected",
        "unexpected",
        "unexpected",
        "bad_request",
        None,
    ]
    assert "ZeroDivisionError: oops" in capsys.readouterr().err
    assert replies[-1]["result"] == {"ok": True}


@pytest.mark.parametrize(
    "params",
    [
        {"objects": "Head"},
        {"objects": ["Head", 3]},
        {"values": [1]},
        {"samples": 1.5},
        {"samples": True},
        {"denoise": 1},
        {"camera": None},
        {"seed": "7"},
    ],
)
def test_parameters_of_a_wrong_type_are_refused_before_the_method_runs(params):
    def method(**_: object) -> dict:
        raise AssertionError("it must not run")

    (reply,) = served(json.dumps({"id": 1, "method": "method", "params": params}), method=method)
    assert reply["error"]["kind"] == "bad_request"
    assert next(iter(params)) in reply["error"]["message"]


def test_progress_and_numpy_values_travel():
    def work(progress, count: int = 2) -> dict:
        for i in range(count):
            progress(np.int64(i), count, "at work")
        return {"array": np.eye(2, dtype=np.float32), "number": np.float32(0.5), "flag": np.bool_(True)}

    replies = served('{"id": "a", "method": "work"}', work=work)
    assert [reply["params"]["done"] for reply in replies[:2]] == [0, 1]
    assert replies[2] == {"id": "a", "result": {"array": [[1, 0], [0, 1]], "number": 0.5, "flag": True}}


# --- the real Blender -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blender() -> Blender:
    return locate()


@pytest.fixture
def worker(blender):
    with BlenderWorker(blender) as running:
        yield running


@pytest.mark.blender
def test_hello_ping_and_a_clean_end(blender):
    with BlenderWorker(blender) as running:
        answer = running.call("ping")
        assert answer["blender_version"].startswith(blender.version or "")
        assert answer["numpy_version"]
        pid = running.pid
    assert pid is not None
    assert ended(pid, 1)


@pytest.mark.blender
def test_files_are_opened_saved_and_refused_in_words(worker, tmp_path):
    path = tmp_path / "Kopf ä #1 顔.blend"
    assert worker.call("file.new") == {}
    assert worker.call("file.save", path=path) == {}
    assert worker.call("file.open", path=path) == {"objects": []}
    before = path.read_bytes()
    newer = tmp_path / "newer.blend"
    newer.write_bytes(b"BLENDER17-01v9900" + bytes(200))
    garbage = tmp_path / "garbage.blend"
    garbage.write_bytes(b"not a blend file" * 50)
    empty = tmp_path / "empty.blend"
    empty.write_bytes(b"")
    cut = tmp_path / "cut.blend"
    cut.write_bytes(before[: len(before) // 2])
    for method, where, kinds in (
        ("file.open", tmp_path / "none.blend", {"file_missing"}),
        ("file.open", tmp_path, {"file_missing"}),
        ("file.open", garbage, {"file_unreadable"}),
        ("file.open", empty, {"file_unreadable"}),
        ("file.open", cut, {"file_unreadable"}),
        ("file.open", newer, {"file_unreadable", "file_newer"}),
        ("file.save", tmp_path / "none" / "a.blend", {"file_unwritable"}),
        ("file.save", tmp_path, {"file_unwritable"}),
    ):
        with pytest.raises(UserError) as caught:
            worker.call(method, path=where)
        assert caught.value.kind in kinds, (where, caught.value.message)
        assert "\n" not in caught.value.message
    assert worker.call("ping")["pid"]
    assert path.read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".rigfit")]


@pytest.mark.blender
def test_methods_refuse_bad_parameters_and_go_on(worker, tmp_path):
    for method, params in (
        ("nothing", {}),
        ("file.open", {}),
        ("file.open", {"path": 3}),
        ("studio.render", {"camera": {}, "out": str(tmp_path / "a.png")}),
        ("studio.render", {"camera": CAMERA, "out": str(tmp_path / "a.png"), "samples": 0}),
        ("studio.render", {"camera": CAMERA, "out": str(tmp_path / "a.png")}),
        ("studio.sample", {"spec": str(tmp_path / "no.npz"), "seed": 1, "start": 0, "count": 1, "out": "x"}),
        ("rig.apply", {"spec": str(tmp_path / "no.npz"), "values": {}}),
        ("rig.read", {"spec": str(tmp_path / "no.npz")}),
        ("rig.export", {"out": str(tmp_path / "a.npz")}),
        ("head.build", {"description": str(tmp_path / "no.npz")}),
    ):
        with pytest.raises(UserError) as caught:
            worker.call(method, **params)
        assert caught.value.message.endswith(".") or caught.value.kind == "bad_request", caught.value.message
    assert os.listdir(tmp_path) == []
    assert worker.call("ping")["pid"]


@pytest.mark.blender
@posix_only
def test_what_blender_prints_never_reaches_the_messages(blender, tmp_path):
    # The same script in a folder of another name (as inside the wheel), with a method that prints from Python and C.
    folder = tmp_path / "_blender_addon é 1"
    shutil.copytree(addon_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "worker.py", encoding="utf-8") as file:
        text = file.read()
    noisy = """
def noise() -> dict:
    import ctypes
    libc = ctypes.CDLL(None)
    libc.printf(b"printf noise\\\\n"); libc.fflush(None)
    libc.write(1, b"raw noise\\\\n", 10)
    print("print noise")
    return {"read": sys.stdin.read(), "package": __package__, "paths": [p for p in sys.path if "_blender_addon" in p]}

HANDLERS["noise"] = noise
"""
    marker = '\n\nif __name__ == "__main__":'
    assert marker in text
    (folder / "worker.py").write_text(text.replace(marker, noisy.replace("\\\\n", "\\n") + marker), encoding="utf-8")
    log = tmp_path / "log.txt"
    line = [part.replace(str(addon_folder()), str(folder)) for part in command_line(blender)]
    with BlenderWorker(command=line, log=log) as running:
        assert running.call("noise") == {"read": "", "package": "blender_addon", "paths": []}
        running.call("file.new")
        assert running.call("ping")["pid"]
    said = log.read_text(errors="replace")
    assert all(f"{name} noise" in said for name in ("printf", "raw", "print"))


def _busy(tmp_path: Path) -> dict:
    """Parameters of a render that takes minutes: the default cube filling a large picture."""
    view = {**CAMERA, "width": 2048, "height": 2048, "focal_px": 1000.0, "principal_px": [1024, 1024]}
    view["translation"] = [0, 0, 6]
    return {"camera": view, "out": str(tmp_path / "a.png"), "samples": 4096}


def _cube_file(blender: Blender, tmp_path: Path) -> Path:
    """The default scene (a cube, a lamp, a camera), saved by Blender itself."""
    path = tmp_path / "cube.blend"
    script = f"import bpy; bpy.ops.wm.read_factory_settings(); bpy.ops.wm.save_as_mainfile(filepath={str(path)!r})"
    line = (
        [str(blender.path), "-c", script]
        if blender.kind == "bpy"
        else [str(blender.path), "-b", "--factory-startup", "--python-expr", script]
    )
    subprocess.run(
        line, check=True, capture_output=True, timeout=120, env=locate_module.child_environment(blender.path)
    )
    return path


@pytest.mark.blender
def test_a_picture_is_rendered_and_recycling_changes_nothing(blender, tmp_path):
    cube = _cube_file(blender, tmp_path)
    view = {**CAMERA, "translation": [0, 0, 6]}
    with BlenderWorker(blender, recycle_after=1) as running:
        assert running.call("file.open", path=cube) == {"objects": ["Cube"]}
        pids = set()
        for name in "abc":
            done = running.call("studio.render", camera=view, out=tmp_path / f"{name}.png", samples=2, seed=3)
            assert done["seconds"] > 0
            assert done["device"] == "cpu"
            pids.add(running.pid)
        assert (len(pids), running.restarts) == (3, 2)
    from PIL import Image

    pictures = [np.asarray(Image.open(tmp_path / f"{name}.png")) for name in "abc"]
    assert pictures[0].shape == (16, 24, 3)
    assert pictures[0].std() > 5
    assert np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[0], pictures[2])


@pytest.mark.blender
def test_a_render_in_progress_can_be_timed_out(blender, tmp_path):
    cube = _cube_file(blender, tmp_path)
    with BlenderWorker(blender, log=tmp_path / "log.txt") as running:
        running.call("file.open", path=cube)
        pid = running.pid
        with pytest.raises(UserError, match="in time"):
            running.call("studio.render", timeout_s=2.0, **_busy(tmp_path))
    assert pid is not None
    assert ended(pid, 5)


@pytest.mark.blender
@posix_only
def test_blender_ends_when_its_parent_is_killed_in_the_middle_of_a_render(blender, tmp_path):
    cube = _cube_file(blender, tmp_path)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import json, sys
                from pathlib import Path
                from rigfit.blender.locate import locate
                from rigfit.blender.worker import BlenderWorker
                worker = BlenderWorker(locate(sys.argv[1]), log=Path(sys.argv[4]))
                worker.start()
                worker.call("file.open", path=sys.argv[2])
                print(worker.pid, flush=True)
                worker.call("studio.render", **json.loads(sys.argv[3]))
            """),
            str(blender.path),
            str(cube),
            json.dumps(_busy(tmp_path)),
            str(tmp_path / "log.txt"),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(locate_module.__file__).parents[2])},
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(2.0)  # into the render
        assert not ended(pid, 0.2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert ended(pid, 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        parent.wait()
