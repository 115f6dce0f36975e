# SPDX-License-Identifier: Apache-2.0
"""What the server's jobs do, with a real Blender: the default head, the demo photo, landmarks found, kept and forgotten."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from backend_client import PHOTO, RemoteError, running
from default_head_files import default_head_files
from rigfit.blender.locate import locate
from rigfit.blender.worker import BlenderWorker
from rigfit.cli import main
from rigfit.errors import Cancelled, UserError
from rigfit.rig.default_head import HeadDescription
from rigfit.rig.embedding import embed_landmarks
from rigfit.rig.known_rigs import kept_landmarks
from rigfit.rig.spec import RigSpec
from rigfit.server import methods
from rigfit.server.jobs import JobContext
from rigfit.server.messages import METHODS, RegisterResult, read_params

try:
    BLENDER = locate()
except UserError as missing:
    pytest.skip(f"no Blender: {missing.message}", allow_module_level=True)

linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """(library file, spec without landmarks, the same rig in a scene of another unit scale)."""
    folder = tmp_path_factory.mktemp("head")
    blend, spec_path, _ = default_head_files()
    RigSpec.load(spec_path).with_landmarks(None).save(folder / "bare.npz")
    with BlenderWorker(BLENDER) as worker:
        # A saved file is a library, too.
        worker.call("file.append", path=blend, objects=["Head"], metres_per_unit=0.7)
        worker.call("rig.export", out=folder / "smaller.npz", objects=["Head"])
        worker.call("file.save", path=folder / "smaller.blend")
    return blend, folder / "bare.npz", folder / "smaller.npz"


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    with running(tmp_path_factory.mktemp("backend")) as process:
        yield process


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def gone_within(within_s: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


# --- over the socket --------------------------------------------------------------------------------------------------


def test_the_demo_photo_is_fitted_and_verified(backend, head):
    blend, bare, _ = head
    with backend.connect(timeout_s=300) as client:
        rig = client.call("rig.register", spec=str(bare))
        assert (rig["origin"], rig["calibrated"], rig["landmarks"]) == ("shipped", True, 478)
        fit, pictures = client.wait(client.send("fit", rig_hash=rig["rig_hash"], photos=[{"path": str(PHOTO)}]))
        photo = fit["fit"]["photos"][0]
        assert photo["landmark_error_percent"] <= 2.5
        assert min(photo["expression"]["mouthSmileLeft"], photo["expression"]["mouthSmileRight"]) > 0.25
        assert photo["size_px"] == [512, 512]
        assert pictures["photo_0"].std() > 30
        values = {name: told["value"] for name, told in fit["fit"]["parameters"].items()}
        ask = {"fit_id": fit["fit_id"], "blend": str(blend), "values": values, "blender": str(BLENDER.path)}
        told, arrays = client.wait(client.send("verify", **ask, objects=["Head"], metres_per_unit=1.0, spec=str(bare)))
        assert told["face_found"]
        assert told["landmark_error_percent"] < 4
        assert told["seconds"] > 0
        assert arrays["render"].shape == (512, 512, 4)
        assert arrays["over"].shape == (512, 512, 3)
        alpha = arrays["render"][..., 3]
        assert alpha[256, 256] == 255
        assert alpha[5, 5] == 0
        assert arrays["render"][alpha == 255][:, :3].std() > 15
        # Where nothing was rendered, the photo is seen.
        assert np.abs(arrays["over"][5, 5].astype(int) - pictures["photo_0"][4, 4].astype(int)).max() < 40


def test_verify_refuses_another_rig_and_missing_objects(backend, head):
    blend, bare, smaller = head
    with backend.connect(timeout_s=120) as client:
        rig = client.call("rig.register", spec=str(bare))
        fit = client.call("fit", rig_hash=rig["rig_hash"], photos=[{"path": str(PHOTO)}])
        ask = {"fit_id": fit["fit_id"], "blend": str(blend), "values": {}, "blender": str(BLENDER.path)}
        for more, kind in (
            ({"spec": str(smaller)}, "other_rig"),
            ({"objects": ["Nobody"]}, "object_missing"),
            ({"blend": str(PHOTO)}, "file_unreadable"),
        ):
            with pytest.raises(RemoteError) as error:
                client.call("verify", **{**ask, **more})
            assert (error.value.code, error.value.kind) == (1, kind)


@linux_only
@pytest.mark.blender
def test_cancel_while_the_landmarks_are_looked_for(backend, head):
    blend, _, smaller = head
    with backend.connect(timeout_s=120) as client:
        number = client.send(
            "rig.register", spec=str(smaller), blend=str(blend), objects=["Head"], metres_per_unit=0.7,
            blender=str(BLENDER.path),
        )  # fmt: skip
        client.wait_for_progress("finding the face")
        assert list(backend.temporary.glob("rigfit-backend-*/blender_*"))
        blenders = children(backend.pid)
        assert blenders
        began = time.monotonic()
        client.call("cancel", id=number)
        with pytest.raises(RemoteError) as error:
            client.wait(number)
        assert error.value.kind == "cancelled"
        assert time.monotonic() - began < 1
        assert gone_within(1, blenders)
        assert not client.call("ping")["busy"]


@linux_only
@pytest.mark.blender
def test_the_end_of_standard_input_while_blender_starts(head, tmp_path):
    blend, _, smaller = head
    with running(tmp_path) as backend, backend.connect() as client:
        client.send("rig.register", spec=str(smaller), blend=str(blend), objects=["Head"], blender=str(BLENDER.path))
        client.wait_for_progress("starting Blender")
        deadline = time.monotonic() + 20
        while not (blenders := children(backend.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        blenders = children(backend.pid) or blenders
        began = time.monotonic()
        backend.process.stdin.close()
        assert backend.ended(3) == 0
        assert time.monotonic() - began < 1.5
        assert gone_within(1, blenders)
        # What an ended Blender leaves is in the backend's own folder, which is gone.
        assert list(backend.temporary.iterdir()) == []


def test_the_default_head_is_described_once(backend):
    with backend.connect() as client:
        path = Path(client.call("rig.default")["description"])
        assert HeadDescription.load(path).parameters > 150
        made = path.stat().st_mtime_ns
        assert client.call("rig.default")["description"] == str(path)
        assert path.stat().st_mtime_ns == made
        path.write_bytes(path.read_bytes()[:5000])
        assert client.call("rig.default")["description"] == str(path)
        assert HeadDescription.load(path).parameters > 150


@pytest.mark.blender
def test_doctor_asks_the_blender_that_is_named(backend):
    with backend.connect() as client:
        told = client.call("doctor", blender=str(BLENDER.path))
        checks = {check["name"]: check for check in told["checks"]}
        assert checks["Blender"]["status"] == "ok", checks["Blender"]
        assert str(BLENDER.path) in checks["Blender"]["found"]
        assert all(check["fix"] for check in told["checks"] if check["status"] == "failed")


# --- what is kept -----------------------------------------------------------------------------------------------------


def register(jobs: methods.Methods, context: JobContext | None = None, **params: object) -> RegisterResult:
    result = jobs.run("rig.register", read_params(METHODS["rig.register"], params), context or quiet()).result
    assert isinstance(result, RegisterResult)
    return result


def quiet() -> JobContext:
    return JobContext(lambda *told: None, None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Two small views instead of eleven: this is about what happens with them.
    quick = partial(embed_landmarks, views=((0, 0), (18, 0)), samples=6)
    monkeypatch.setattr(methods, "embed_landmarks", quick)
    return tmp_path / "cache" / "rigfit" / "rigs"


def test_landmarks_are_found_once_and_kept(head, cache, tmp_path, monkeypatch, capsys):
    blend, _, smaller = head
    ask = {
        "spec": str(smaller),
        "blend": str(blend),
        "objects": ["Head"],
        "metres_per_unit": 0.7,
        "blender": str(BLENDER.path),
    }
    first = register(methods.Methods(), **ask)
    assert (first.origin, first.calibrated) == ("found", False)
    assert first.landmarks >= 465
    spec = RigSpec.load(smaller)
    assert [path.name for path in cache.iterdir()] == [f"{spec.rig_hash}.npz"]
    # Another backend, and no .blend: it is known.
    jobs = methods.Methods()
    assert register(jobs, spec=str(smaller)).origin == "kept"
    fit = jobs.run(
        "fit", read_params(METHODS["fit"], {"rig_hash": spec.rig_hash, "photos": [{"path": str(PHOTO)}]}), quiet()
    )
    told = json.loads(json.dumps(fit.result.model_dump()))["fit"]["photos"][0]
    assert told["landmark_error_percent"] < 4
    # The command line knows it as well, and renders nothing.
    argv = ["rigfit", "rig", "export", str(smaller.with_suffix(".blend")), str(tmp_path / "out.npz")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "known from before" in capsys.readouterr().out
    exported = RigSpec.load(tmp_path / "out.npz")
    assert exported.rig_hash == spec.rig_hash
    assert exported.landmarks is not None
    # A damaged file is as good as none.
    kept = cache / f"{spec.rig_hash}.npz"
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(UserError) as error:
        register(methods.Methods(), spec=str(smaller))
    assert error.value.kind == "needs_blend"
    assert kept_landmarks(spec) is None


def test_landmarks_that_were_cancelled_are_not_kept(head, cache):
    blend, _, smaller = head
    context = JobContext(lambda done, total, text: context.stop() if "several sides" in text else None, None)
    with pytest.raises((Cancelled, UserError)):
        register(
            methods.Methods(), context, spec=str(smaller), blend=str(blend), objects=["Head"], metres_per_unit=0.7,
            blender=str(BLENDER.path),
        )  # fmt: skip
    assert not cache.exists()
    assert os.environ["XDG_CACHE_HOME"]
