# SPDX-License-Identifier: Apache-2.0
"""The main job on real input, with a real Blender: head → spec → photo → fit → applied, rendered, saved."""

from functools import partial

import numpy as np
import pytest
from default_head_files import default_head_files
from rigfit.blender.locate import locate
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.fitting import fit_photos
from rigfit.fitting.result import FitResult
from rigfit.fitting.run import FitJob, demo_photo, run_fit
from rigfit.photo.landmarks import MediapipeDetector
from rigfit.photo.load import load_photo
from rigfit.rig.embedding import embed_landmarks
from rigfit.rig.known_rigs import shipped_landmarks
from rigfit.rig.spec import RigSpec

try:
    BLENDER = locate()
except UserError as missing:
    pytest.skip(f"no Blender: {missing.message}", allow_module_level=True)


@pytest.fixture(scope="module")
def head():
    return default_head_files()


def test_the_shipped_landmarks_belong_to_the_head_that_is_built(head):
    """Fails when the head changed and scripts/make_head_assets.py was not run."""
    _, spec_path, complete = head
    assert complete
    spec = RigSpec.load(spec_path)
    assert spec.landmarks is not None
    assert (spec.landmarks.triangle >= 0).sum() == 478
    assert int(np.ravel(spec.detector["samples"])[0]) >= 500


def test_the_demo_photo_is_fitted_applied_and_rendered(head, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_photos, "VERIFY_SIZE_PX", 256)
    monkeypatch.setattr("rigfit.fitting.run.verify", partial(fit_photos.verify, samples=8))
    blend, spec_path, _ = head
    steps = []
    job = FitJob([demo_photo(tmp_path)], rig=spec_path, blend=blend, out=tmp_path / "out")
    done = run_fit(job, lambda *step: steps.append(step))
    photo = done.result.photos[0]
    assert photo.landmark_error_percent <= 2.5
    expression = photo.expression
    assert min(expression["mouthSmileLeft"], expression["mouthSmileRight"]) > 0.25
    lips_apart = expression["jawOpen"] + expression["mouthLowerDownLeft"] + expression["mouthUpperUpLeft"]
    assert lips_apart > 0.2
    assert photo.verification is not None
    assert photo.verification.face_found
    assert photo.verification.landmark_error_percent < 6
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "fit.json",
        "comparison.png",
        "render.png",
        "fitted.blend",
    }
    assert steps[-1][0] == steps[-1][1]
    # What was saved is what was fitted.
    with BlenderWorker(BLENDER) as worker:
        worker.call("file.open", path=tmp_path / "out" / "fitted.blend")
        read = worker.call("rig.read", spec=spec_path)["values"]
    for name, value in FitResult.load(tmp_path / "out" / "fit.json").values().items():
        assert read[name] == pytest.approx(value, abs=1e-6), name
    rendered = load_photo(tmp_path / "out" / "render.png").image
    assert rendered.std() > 20


def test_embedding_finds_the_landmarks_where_they_were_shipped(head, tmp_path):
    """The embedding made anew from two small views is near the shipped one: on the same skin, within millimetres."""
    from rigfit.rig import embedding
    from rigfit.rig.surface import points_at

    blend, spec_path, _ = head
    with BlenderWorker(BLENDER) as worker:
        worker.call("file.open", path=blend)
        found = embed_landmarks(worker, spec_path, MediapipeDetector(passes=1), views=((0, 0), (18, 0)), samples=6)
    spec = RigSpec.load(spec_path)
    shipped = shipped_landmarks(spec)
    assert shipped is not None
    assert shipped.landmarks is not None
    one = points_at(spec.neutral, spec.triangles, found.triangle, found.barycentric)
    two = points_at(spec.neutral, spec.triangles, shipped.landmarks.triangle, shipped.landmarks.barycentric)
    known = found.triangle >= 0
    # Two views do not see all of the outline; what they do not see is not embedded.
    assert known.sum() >= 465
    apart = 1000 * np.linalg.norm(one - two, axis=1)[known]
    assert np.median(apart) < 2.0
    assert np.percentile(apart, 90) < 6.0
    on_face = found.triangle[:468][known[:468]]
    skin = ~np.isin(spec.part[on_face], [spec.parts.index(p) for p in embedding.NOT_SKIN])
    assert skin.all()
