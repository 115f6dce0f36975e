# SPDX-License-Identifier: Apache-2.0
"""What a landmark detector answers when it looks at this rig: bias, response and noise.

A detector is not a pin on the skin. On a given rig it is off by a constant amount per landmark (the embedding is not
perfect), by an amount that depends on the pose, and by noise that neighbouring landmarks share; and it does not follow
a face all the way (it pulls every face towards its own mean). All of that turns with the head, so it is written down in
the face frame. Take the pose that fits the *neutral* face best to the detections, with rotation R (yaw, pitch); then for a
face with parameters p

    detected = projected(neutral) + s · R · ( Σ_b basis_b(yaw, pitch) · bias_b + Σ_j q_j · response_j + ε )
    q = (p − default) / sd,     ε ~ N(0, U Uᵀ + diag(d))

The three components of both sides are u, v and the relative depth that a detector may answer with, all in pixels; s is
pixels per face unit at the depth of the face, so that everything in the brackets is in face units (distance between
the outer eye corners). Where the depth is not known its row is left out. The response contains what the shape does to
the landmarks, how much of it the detector sees, and what the neutral face's pose takes away of it; learned as one
thing it is far better determined than as a correction of the geometry (measured: docs/architecture.md).
`rigfit.fitting.calibrate` learns the numbers from renders of the rig; `DetectorModel.uncalibrated` is only the noise
that we assume before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.photo import mesh478

# Share of the assumed variance that neighbouring landmarks have in common, and how far it reaches (face units).
SHARED_VARIANCE = 0.6
SHARED_REACH = 0.35
SHARED_RANK = 24


def pose_basis(yaw: float, pitch: float) -> NDArray[np.float64]:
    """(7,) functions of the head angles (radians) that carry the pose-dependent bias."""
    return np.array([1.0, yaw, pitch, yaw * yaw, pitch * pitch, yaw * pitch, yaw**3])


@dataclass(frozen=True)
class DetectorModel:
    """See the module docstring. L = 478 landmarks, P parameters in spec order, B = 7 pose functions, K noise factors.

    bias: (B, L, 3). response: (P, L, 3). sd: (P,) > 0, of the parameters around their defaults.
    noise_factor: (L, 3, K). noise_diagonal: (L, 3) variances. All in face units, face frame.
    prior_precision: (P, P) inverse covariance of the parameters around their defaults, over the faces it was trained on.
    samples: how many renders it saw; 0: assumed, not learned.
    """

    bias: NDArray[np.float64]
    response: NDArray[np.float64]
    sd: NDArray[np.float64]
    noise_factor: NDArray[np.float64]
    noise_diagonal: NDArray[np.float64]
    prior_precision: NDArray[np.float64]
    samples: int

    @property
    def calibrated(self) -> bool:
        return self.samples > 0

    @staticmethod
    def uncalibrated(landmarks: NDArray[np.floating], sd: NDArray[np.floating], noise: float) -> DetectorModel:
        """Noise of `noise` face units per landmark, partly shared between neighbours.

        landmarks: (L,3) neutral landmarks in the face frame (NaN where not embedded). sd: (P,) prior.
        The shared part is a Gaussian process over the face: hundreds of landmarks are not hundreds of independent
        measurements, and a solver that believes so trusts a blunt detector too much.
        """
        points = np.nan_to_num(np.asarray(landmarks, np.float64))
        count = len(points)
        spread = np.full(count, noise)
        # The outline is the least certain part of every detector; it slides along the cheek.
        spread[list(mesh478.FACE_OVAL)] *= 1.6
        distance = np.linalg.norm(points[:, None] - points[None], axis=2)
        kernel = np.exp(-0.5 * (distance / SHARED_REACH) ** 2) * np.outer(spread, spread) * SHARED_VARIANCE
        values, vectors = np.linalg.eigh(kernel)
        one = vectors[:, -SHARED_RANK:] * np.sqrt(np.maximum(values[-SHARED_RANK:], 0))
        factor = np.zeros((count, 3, 3 * SHARED_RANK))
        for axis in range(3):
            factor[:, axis, axis * SHARED_RANK : (axis + 1) * SHARED_RANK] = one
        diagonal = (spread**2 - np.sum(one**2, axis=1))[:, None].repeat(3, axis=1)
        parameters = len(sd)
        return DetectorModel(
            bias=np.zeros((len(pose_basis(0, 0)), count, 3)),
            response=np.zeros((parameters, count, 3)),
            sd=np.asarray(sd, np.float64),
            noise_factor=factor,
            noise_diagonal=diagonal,
            prior_precision=np.diag(1 / np.asarray(sd, np.float64) ** 2),
            samples=0,
        )

    def to_arrays(self) -> dict[str, NDArray]:
        """Arrays for the rig spec (names without the `detector_` prefix)."""
        return {
            "bias": self.bias.astype(np.float32),
            "response": self.response.astype(np.float32),
            "sd": self.sd.astype(np.float32),
            "noise_factor": self.noise_factor.astype(np.float32),
            "noise_diagonal": self.noise_diagonal.astype(np.float32),
            "prior_precision": self.prior_precision.astype(np.float32),
            "samples": np.array(self.samples, np.int32),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray], parameters: int) -> DetectorModel:
        try:
            model = DetectorModel(
                **{
                    name: np.asarray(arrays[name], np.float64)
                    for name in ("bias", "response", "sd", "noise_factor", "noise_diagonal", "prior_precision")
                },
                samples=int(np.ravel(arrays["samples"])[0]),
            )
        except KeyError as missing:
            raise UserError(
                f"The detector model in the rig spec lacks {missing}: run `rigfit rig calibrate` again.",
                kind="bad_spec",
            ) from None
        landmarks = model.bias.shape[1] if model.bias.ndim == 3 else -1
        shapes_agree = (
            model.bias.shape == (len(pose_basis(0, 0)), landmarks, 3)
            and model.response.shape == (parameters, landmarks, 3)
            and model.sd.shape == (parameters,)
            and model.prior_precision.shape == (parameters, parameters)
            and model.noise_factor.shape[:2] == model.noise_diagonal.shape == (landmarks, 3)
        )
        finite = all(np.isfinite(v).all() for v in vars(model).values() if isinstance(v, np.ndarray))
        if not (shapes_agree and finite and (model.sd > 0).all() and (model.noise_diagonal > 0).all()):
            raise UserError(
                "The detector model in the rig spec does not fit its parameters: run `rigfit rig calibrate` again.",
                kind="bad_spec",
            )
        return model
