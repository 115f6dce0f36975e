# SPDX-License-Identifier: Apache-2.0
"""The child process: what it is given, how it ends, what it leaves behind. Real processes."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import runs

from blender_addon.link import process as module
from blender_addon.link.process import (
    BackendProcess,
    clean_environment,
    describe_exit,
    read_address,
    read_attach_file,
)
from blender_addon.messages import RigError

FAKE = str(Path(__file__).with_name("fake_backend.py"))
POSIX = pytest.mark.skipif(os.name != "posix", reason="POSIX only")


def until(happened, timeout_s: float = 8.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = happened()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError("it did not happen")


@pytest.fixture
def start(tmp_path):
    started: list[BackendProcess] = []

    def begin(script: str | list[str], **options) -> BackendProcess:
        argv = [sys.executable, "-c", textwrap.dedent(script)] if isinstance(script, str) else script
        started.append(BackendProcess(argv, str(tmp_path / "log" / "backend.log"), **options))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        until(lambda one=one: one.poll() is not None)
        one.clean_up()
        assert not os.path.exists(one._folder)


def ended(one: BackendProcess) -> int:
    until(lambda: one.poll() is not None)
    return one.exit_code


def test_the_token_comes_over_standard_input_and_nowhere_else(start):
    one = start(
        """
        import os, sys
        print([sys.stdin.readline(), sys.argv, dict(os.environ)], flush=True)
        print(["then", sys.stdin.read()], flush=True)
        """
    )
    until(lambda: log_lines(one)[:1] and Path(one.log_path).read_bytes().endswith(b"\n"))
    line, argv, environment = ast.literal_eval(log_lines(one)[0])
    assert line == one.token.hex() + "\n"
    assert len(one.token) == 32
    assert argv[1] == "--address-file"
    assert one.token.hex() not in repr([argv, environment])
    one.close_input()
    assert ended(one) == 0
    assert log_lines(one)[1] == "['then', '']"


def log_lines(one: BackendProcess) -> list[str]:
    return Path(one.log_path).read_text(encoding="utf-8").splitlines()


def test_two_starts_two_tokens(start):
    assert start("").token != start("").token


def test_the_working_folder_is_private_and_empty(start):
    one = start("import os; print(os.getcwd(), os.listdir(), oct(os.stat('.').st_mode & 0o777))")
    assert ended(one) == 0
    folder, _, rest = log_lines(one)[0].rpartition(" []")
    assert os.path.samefile(folder, one._folder)
    if os.name == "posix":
        assert rest == " 0o700"
        assert stat.S_IMODE(os.stat(one.log_path).st_mode) == 0o600


def test_temporary_files_go_with_the_child(start):
    one = start("import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(100)")
    until(one.last_words)
    made = one.last_words()
    assert os.path.samefile(os.path.dirname(made), one._folder)
    one.kill()
    ended(one)
    one.clean_up()
    assert not os.path.exists(made)


def test_the_environment_of_blenders_python_stays_here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/blender/lib")
    monkeypatch.setenv("PYTHONHOME", "/blender")
    monkeypatch.setenv("PYTHONSTARTUP", "x")
    monkeypatch.setenv("__PYVENV_LAUNCHER__", "x")
    monkeypatch.setenv("RIGFIT_SOMETHING", "ä")
    environment = clean_environment({"ADDED": "1"})
    assert {name for name in environment if "PY" in name and name.startswith(("PYTHON", "__PYV"))} == {
        *("PYTHONUTF8", "PYTHONUNBUFFERED", "PYTHONSAFEPATH"),
    }
    assert environment["RIGFIT_SOMETHING"] == "ä"
    assert environment["ADDED"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_module_beside_the_artists_file_is_not_imported(start, tmp_path, monkeypatch):
    (tmp_path / "rigfit_victim.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    one = start([sys.executable, "-m", "rigfit_victim"])
    assert ended(one) != 0
    assert "No module named" in one.last_words()


@POSIX
def test_all_of_it_is_killed(start):
    one = start(
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(child.pid, flush=True)
        time.sleep(100)
        """
    )
    grandchild = int(until(one.last_words))
    assert runs(grandchild)
    started = time.monotonic()
    one.kill()
    assert time.monotonic() - started < 0.1
    assert ended(one) == -signal.SIGKILL
    until(lambda: not runs(grandchild))


@POSIX
def test_what_a_dead_child_left_running_is_killed(start):
    one = start(
        """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(child.pid, flush=True)
        os._exit(5)
        """
    )
    assert ended(one) == 5
    until(lambda: not runs(int(one.last_words())))


def test_killing_twice_and_after_the_end(start):
    one = start("")
    assert ended(one) == 0
    one.kill()
    one.kill()
    one.close_input()
    assert one.poll() == 0


def test_the_last_words(start):
    one = start(
        r"""
        import sys
        print("x" * 10000)
        print("first")
        sys.stderr.write("Traceback:\nModuleNotFoundError: \x1b[31mnothing\x1b[0m ü\n\n  \n")
        sys.exit(4)
        """
    )
    assert ended(one) == 4
    assert one.last_words() == "ModuleNotFoundError: [31mnothing[0m ü"
    os.unlink(one.log_path)
    assert one.last_words() == ""


@POSIX
def test_a_crash_in_c_code_tells_what_it_was(start):
    one = start("import faulthandler, ctypes; faulthandler.enable(); print('well'); ctypes.string_at(0)")
    assert ended(one) == -signal.SIGSEGV
    assert one.last_words() == "Fatal Python error: Segmentation fault"


def test_last_words_are_short(start):
    one = start("print('y' * 100000, end='')")
    assert ended(one) == 0
    assert one.last_words() == "y" * 200


def test_each_start_has_its_own_log(start):
    assert ended(start("print('one')")) == 0
    two = start("print('two')")
    assert ended(two) == 0
    assert log_lines(two) == ["two"]


@POSIX
def test_a_log_without_end_is_cut(start, monkeypatch):
    monkeypatch.setattr(module, "LOG_LIMIT", 1 << 20)
    monkeypatch.setattr(module, "LOG_CHECK_S", 0.01)
    one = start(
        """
        import os, time
        while True:
            os.write(1, b"blah blah blah\\n" * 4000)
            time.sleep(0.001)
        """
    )
    sizes = []
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert one.poll() is None
        sizes.append(os.stat(one.log_path).st_size)
        time.sleep(0.005)
    assert max(sizes) < 8 << 20
    assert sum(later < earlier for earlier, later in itertools.pairwise(sizes)) >= 2


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["/nowhere/python"], "No such file"),
        ([str(Path(__file__).parent)], "denied"),
        ([__file__], "denied|Exec format|not a valid"),
        (["python\0"], "null byte"),
    ],
)
def test_what_cannot_be_started(start, argv, word, tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with pytest.raises(RigError) as caught:
        start(argv)
    assert caught.value.kind == "backend_not_started"
    assert re.search(word, caught.value.message), caught.value.message
    # Nothing is left behind: no folder, no open pipe.
    assert [name for name in os.listdir(tmp_path) if name.startswith("rigfit-")] == []
    if before:
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RigError) as caught:
        BackendProcess([sys.executable], str(tmp_path / "file" / "log"))
    assert caught.value.kind == "backend_not_started"


def test_the_address_appears_when_it_is_written(start):
    one = start([sys.executable, FAKE])
    address = until(one.address)
    assert (address.protocol, address.version, address.token) == (1, "0.0-fake", None)
    one.close_input()
    assert ended(one) == 0


def test_no_address_yet(start):
    one = start([sys.executable, FAKE, "--fault", "no-address"])
    for _ in range(5):
        assert one.address() is None


def test_a_bad_address(start):
    one = start([sys.executable, FAKE, "--fault", "bad-address"])

    def bad() -> RigError | None:
        try:
            one.address()
        except RigError as error:
            return error
        return None

    assert until(bad).kind == "backend_bad_address"


GOOD = {
    "schema": "rigfit.address/1",
    "host": "127.0.0.1",
    "port": 50123,
    "pid": 4711,
    "protocol": 1,
    "version": "0.1.0",
}


def test_the_pages_example_is_an_address():
    page = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    example = next(line for line in page.splitlines() if line.startswith('{"schema"'))
    assert json.loads(example) == GOOD
    address = read_address(example.encode())
    assert (address.port, address.protocol, address.version, address.token) == (50123, 1, "0.1.0", None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "rigfit.address/2"}, "schema"),
        ({"host": "localhost"}, "host"),
        ({"host": "127.0.0.2"}, "host"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "50123"}, "port"),
        ({"port": True}, "port"),
        ({"protocol": None}, "protocol"),
        ({"token": "00"}, "token"),
        ({"token": 5}, "token"),
    ],
)
def test_what_is_no_address(changes, reason):
    with pytest.raises(ValueError, match=reason):
        read_address(json.dumps({**GOOD, **changes}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"null", b"[" * 50000, b"{}" + b" " * 70000])
def test_what_is_no_address_file(text):
    with pytest.raises(ValueError, match=r"it is|schema"):
        read_address(text)


# --- attach -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def attach_file(tmp_path):
    path = tmp_path / "address.json"
    path.write_text(json.dumps({**GOOD, "token": "ab" * 32}))
    path.chmod(0o600)
    return path


def refused(path) -> RigError:
    with pytest.raises(RigError) as caught:
        read_attach_file(str(path))
    return caught.value


def test_an_attach_file(attach_file):
    address = read_attach_file(str(attach_file))
    assert (address.port, address.token) == (50123, b"\xab" * 32)
    assert "ab" * 10 not in repr(address)


def test_no_attach_file(tmp_path, attach_file):
    assert refused(tmp_path / "nothing").kind == "attach_missing"
    assert refused(attach_file / "below").kind == "attach_missing"
    assert refused("with\0zero").kind == "attach_missing"


@POSIX
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_an_attach_file_that_others_reach(attach_file, mode):
    attach_file.chmod(mode)
    error = refused(attach_file)
    assert error.kind == "attach_unsafe"
    assert "other users" in error.message


@POSIX
def test_an_attach_file_of_somebody_else(attach_file, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert "another user" in refused(attach_file).message


@POSIX
def test_an_attach_file_that_is_none(tmp_path, attach_file):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(attach_file)
    os.mkfifo(pipe, 0o600)
    assert "a link" in refused(link).message
    assert "no regular file" in refused(tmp_path).message
    started = time.monotonic()
    assert "no regular file" in refused(pipe).message
    assert time.monotonic() - started < 0.5


def test_an_attach_file_without_sense(attach_file):
    attach_file.write_text(json.dumps(GOOD))
    assert "holds no token" in refused(attach_file).message
    attach_file.write_text("{")
    error = refused(attach_file)
    assert (error.kind, "not JSON" in error.message) == ("attach_bad", True)


# --- words ------------------------------------------------------------------------------------------------------------


def test_how_a_process_ended():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-200) == "ended by signal 200"
    if os.name == "posix":
        assert describe_exit(-11) == "ended by SIGSEGV"
        assert describe_exit(-9) == "ended by SIGKILL, perhaps for lack of memory"


def test_how_a_process_ended_on_windows(monkeypatch):
    monkeypatch.setattr(module.sys, "platform", "win32")
    assert describe_exit(0xC0000005) == "exit code 0xC0000005"
    assert describe_exit(1) == "exit code 1"


# --- the parent goes --------------------------------------------------------------------------------------------------

PARENT = """
import sys, time
from blender_addon.link.process import BackendProcess
one = BackendProcess([sys.executable, sys.argv[1]], sys.argv[2])
while one.address() is None:
    time.sleep(0.01)
print(one.pid, flush=True)
if sys.argv[3] == "wait":
    time.sleep(60)
"""


@POSIX
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_the_child_ends_with_its_parent(tmp_path, end):
    """kill -9 closes the pipe of the child's standard input, and so does an interpreter that ends in order."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAKE, str(tmp_path / "log"), "wait" if end == "killed" else "go"],
        cwd=Path(__file__).resolve().parents[2],
        # Whoever is killed leaves its private folder behind.
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        child = int(parent.stdout.readline())
        if end == "killed":
            assert runs(child)
            parent.kill()
        parent.wait(10)
        until(lambda: not runs(child), 5)
