# SPDX-License-Identifier: Apache-2.0
"""Both ends of the link together: the add-on's client and a real `rigfit serve`. No Blender."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_rig import toy_rig

from blender_addon.link.client import Client, Launch, Ticket
from blender_addon.messages import BackendError

ROOT = Path(__file__).resolve().parents[2]
PORTRAIT = str(resources.files("rigfit") / "assets" / "astronaut.png")
POSIX = pytest.mark.skipif(os.name != "posix", reason="POSIX only")


class Artist:
    """A client at work, which polls as Blender's timer does."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.texts: list[str] = []
        self.longest_look_s = 0.0

    def until(self, happened: Callable[[], object], timeout_s: float = 40.0) -> None:
        end = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < end, (self.client.state, self.texts)
            started = time.thread_time()
            self.client.poll()
            self.longest_look_s = max(self.longest_look_s, time.thread_time() - started)
            if self.texts[-1:] != [self.client.text]:
                self.texts.append(self.client.text)
            time.sleep(0.003)

    def ask(self, method: str, **params: object) -> Ticket:
        ticket = self.client.submit(method, params)
        self.until(lambda: ticket.settled)
        return ticket


def runs(pid: int) -> bool:
    """Whether the process runs; one that nobody has collected yet does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return not os.path.isdir("/proc/self")
    return state not in "ZX"


def gone(pid: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not runs(pid)


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "backend"), "XDG_CACHE_HOME": str(folder / "cache"), "LOCALAPPDATA": str(folder)}


def launch(folder: Path) -> Launch:
    argv = [sys.executable, "-m", "rigfit", "serve", "--log", str(folder / "backend.log")]
    return Launch(argv, None, str(folder / "child.log"), environment(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("link")


@pytest.fixture(scope="module")
def artist(folder) -> Iterator[Artist]:
    """One backend for all the tests that leave it alive."""
    client = Client(lambda: launch(folder))
    yield Artist(client)
    client.kill()


@pytest.fixture(scope="module")
def rig_hash(artist, folder) -> str:
    path = folder / "toy.npz"
    toy_rig().save(path)
    ticket = artist.ask("rig.register", spec=str(path))
    assert ticket.state == "done", ticket.error
    assert ticket.result["origin"] == "spec"
    return ticket.result["rig_hash"]


@pytest.fixture
def short_lived(tmp_path) -> Iterator[Artist]:
    """A backend of this test's own."""
    client = Client(lambda: launch(tmp_path))
    yield Artist(client)
    pid = client.pid
    client.kill()
    assert pid is None or not runs(pid)


def test_hello_and_ping(artist):
    ticket = artist.ask("ping")
    assert ticket.state == "done", (ticket.error, artist.texts)
    assert set(ticket.result) == {"busy", "queued", "uptime_s"}
    assert artist.client.server.startswith("rigfit ")
    assert (artist.client.state, artist.client.alive, artist.client.answering) == ("ready", True, True)
    assert artist.texts[0] == "Starting the backend"


def test_a_fit(artist, rig_hash):
    artist.texts.clear()
    ticket = artist.ask("fit", rig_hash=rig_hash, photos=[{"path": PORTRAIT}])
    assert ticket.state == "done", ticket.error
    fit = ticket.result["fit"]
    assert (fit["schema"], fit["rig_hash"]) == ("rigfit.fit/1", rig_hash)
    assert set(ticket.blobs) == {"photo_0", "landmarks_0"}
    for name, array in ticket.blobs.items():
        assert (name, array.dtype, array.shape) == (name, np.uint8, (384, 384, 3))
        assert array.std() > 20
    assert ticket.progress[0] <= ticket.progress[1]
    assert any("astronaut.png" in text for text in artist.texts), artist.texts
    assert artist.longest_look_s < 0.05


@pytest.mark.parametrize(
    ("method", "params", "kind"),
    [
        ("no.such.method", {}, "unknown_method"),
        ("fit", {}, "bad_params"),
        ("fit", {"rig_hash": "0" * 64, "photos": [{"path": "relative.png"}]}, "bad_params"),
        ("fit", {"rig_hash": "0" * 64, "photos": [{"path": "/nowhere.png"}]}, "unknown_rig"),
        ("verify", {"fit_id": "none", "blend": "/nowhere.blend", "values": {}}, "unknown_fit"),
    ],
)
def test_errors_come_through_as_they_are(artist, method, params, kind):
    ticket = artist.ask(method, **params)
    assert isinstance(ticket.error, BackendError)
    assert ticket.error.kind == kind, ticket.error
    assert ticket.error.message.endswith(".")
    assert artist.client.state == "ready"


def test_a_photo_without_a_face(artist, rig_hash, tmp_path):
    path = tmp_path / "grün \udcff.png" if sys.platform == "linux" else tmp_path / "grün.png"
    Image.new("RGB", (300, 300), (90, 160, 90)).save(path)
    ticket = artist.ask("fit", rig_hash=rig_hash, photos=[{"path": str(path)}])
    assert ticket.error.kind == "no_face"
    assert artist.ask("ping").state == "done"


def test_cancel_in_the_middle_of_a_fit(artist, rig_hash):
    pid = artist.client.pid
    ticket = artist.client.submit("fit", {"rig_hash": rig_hash, "photos": [{"path": PORTRAIT}] * 32})
    artist.until(lambda: ticket.progress[0] >= 1)
    assert ticket.progress[1] > 30
    started = time.monotonic()
    artist.client.cancel(ticket)
    assert (ticket.state, artist.client.state) == ("cancelled", "cancelling")
    assert time.monotonic() - started < 0.2
    artist.until(lambda: artist.client.state == "ready", 5)
    assert artist.ask("ping").result["busy"] is False
    assert artist.client.pid == pid


@POSIX
def test_the_token_is_nowhere(artist, folder):
    token = artist.client._process.token.hex()
    pid = artist.client.pid
    seen = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    if os.path.isdir("/proc/self"):
        seen += [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    address = json.loads(Path(artist.client._process._address_path).read_text())
    assert set(address) == {"schema", "host", "port", "pid", "protocol", "version"}
    assert not [text for text in seen if token.encode() in text]


@POSIX
def test_killed_in_the_middle_of_a_fit(artist, rig_hash):
    pid = artist.client.pid
    ticket = artist.client.submit("fit", {"rig_hash": rig_hash, "photos": [{"path": PORTRAIT}] * 32})
    artist.until(lambda: ticket.progress[2])
    os.kill(pid, signal.SIGKILL)
    artist.until(lambda: ticket.settled, 5)
    assert ticket.error.kind == "backend_died"
    assert "SIGKILL" in ticket.error.message
    # A new one, which has to be told the rig again.
    assert artist.ask("ping").state == "done"
    assert artist.client.pid != pid
    again = artist.ask("fit", rig_hash=rig_hash, photos=[{"path": PORTRAIT}])
    assert again.error.kind == "unknown_rig"


def test_the_gentle_end(short_lived):
    assert short_lived.ask("ping").state == "done"
    process = short_lived.client._process
    short_lived.client.stop()
    short_lived.until(lambda: short_lived.client.state == "off", 3)
    assert process.exit_code == 0
    assert not runs(process.pid)


BLENDER = """
import sys, time
from pathlib import Path
from blender_addon.link.client import Client, Launch
launch = Launch([sys.executable, "-m", "rigfit", "serve"], None, sys.argv[1], {"PYTHONPATH": sys.argv[2]})
client = Client(lambda: launch)
ticket = client.submit("ping", {})
while not ticket.settled:
    client.poll()
    time.sleep(0.005)
print(client.pid, ticket.state, flush=True)
time.sleep(60)
"""


@POSIX
def test_it_ends_when_blender_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Whoever is killed leaves its private folder behind.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", BLENDER, str(tmp_path / "child.log"), str(ROOT / "backend")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as blender:
        pid, state = blender.stdout.readline().split()
        assert state == "done"
        blender.kill()
        blender.wait(10)
        assert gone(int(pid), 5.0)


@pytest.fixture
def developer(tmp_path) -> Iterator[Path]:
    """The attach file of a backend that was started by hand."""
    path = tmp_path / "attach.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "rigfit", "serve", "--attach", "--address-file", str(path)],
        env=os.environ | environment(tmp_path),
        stdin=subprocess.DEVNULL,
    )
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    yield path
    process.terminate()
    process.wait(10)


def test_attached_and_a_second_blender(developer, tmp_path):
    first, second = (Artist(Client(lambda: Launch(None, str(developer), ""))) for _ in range(2))
    try:
        assert first.ask("ping").state == "done"
        assert second.ask("ping").error.kind == "backend_in_use"
        first.client.stop()
        assert second.ask("ping").state == "done"
        # Somebody who has the address but not the token is told nothing.
        second.client.stop()
        address = json.loads(developer.read_text())
        forged = tmp_path / "forged.json"
        forged.touch(mode=0o600)
        forged.write_text(json.dumps({**address, "token": "ab" * 32}))
        stranger = Artist(Client(lambda: Launch(None, str(forged), "")))
        assert stranger.ask("ping").error.kind == "backend_proof"
    finally:
        first.client.kill()
        second.client.kill()
