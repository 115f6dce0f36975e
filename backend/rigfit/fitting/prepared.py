# SPDX-License-Identifier: Apache-2.0
"""What every fit of a rig needs and no photo changes: landmarks in the face frame, detector model, outline candidates."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rigfit.fitting.detector_model import DetectorModel
from rigfit.fitting.face_frame import FaceFrame, landmark_model
from rigfit.fitting.outline import OutlineCandidates
from rigfit.rig.blendshapes import PointModel
from rigfit.rig.spec import RigSpec


@dataclass(frozen=True)
class PreparedRig:
    """frame: of the neutral landmarks. points: the 478 landmarks in it. assumed: noise of any detector, for the pose and
    for rigs without a calibration. calibrated: the learned model, if the spec has one. outline: None with a calibrated
    model, which knows what the outline does."""

    frame: FaceFrame
    points: PointModel
    assumed: DetectorModel
    calibrated: DetectorModel | None
    outline: OutlineCandidates | None


# By spec, then by (noise, prior share); they die with the spec. Half of a fit's time without it.
_prepared: WeakKeyDictionary[RigSpec, dict[tuple[float, float], PreparedRig]] = WeakKeyDictionary()


def prepare(spec: RigSpec, noise: float, prior_share: float) -> PreparedRig:
    """noise: assumed detector error (face units), prior_share: see `prior_sd`; both unused on a calibrated rig."""
    known = _prepared.setdefault(spec, {})
    key = (noise, prior_share)
    if key not in known:
        on_rig = landmark_model(spec)
        frame = FaceFrame.from_landmarks(on_rig.neutral)
        points = frame.model_to_face(on_rig)
        assumed = DetectorModel.uncalibrated(points.neutral, prior_sd(spec, prior_share), noise)
        learned = DetectorModel.from_arrays(spec.detector, len(spec.parameters)) if spec.detector else None
        outline = None if learned else OutlineCandidates.of(spec, frame, points.neutral)
        known[key] = PreparedRig(frame, points, assumed, learned, outline)
    return known[key]


def prior_sd(spec: RigSpec, share: float) -> NDArray[np.float64]:
    """(P,) prior standard deviation: `share` of the way from the default to the farther limit."""
    reach = [max(p.maximum - p.default, p.default - p.minimum) for p in spec.parameters]
    return np.maximum(share * np.array(reach), 1e-6)
