# SPDX-License-Identifier: Apache-2.0
"""Landmarks → face parameters and camera: bounded, regularised, robust Gauss–Newton.

Unknowns: identity parameters, shared by all photos of a person; per photo the expression parameters, head rotation,
position and focal length. Everything is solved in the face frame (`face_frame.py`), so that a rig in centimetres,
lying on its back, gives the same numbers. Minimised is

    Σ_photos  rᵀ W (U Uᵀ + D)⁻¹ W r   +   Σ_j ((p_j − d_j) / sd_j)²   +   λ Σ_expression |p_j − d_j| / sd_j   +   focal prior

with r = (detected − projected) / s − expected offset of the detector (`detector_model.py`), subject to every
parameter's own limits. The maximum a posteriori view of it: Gaussian prior, Gaussian detector noise with Student-t
weights (Lange et al. 1989, eq. 8: w = (ν + 2) / (ν + m²), m the Mahalanobis distance of a landmark in 2D).

- The mesh is linear in the parameters, so the projection's Jacobian is exact (`landmark_jacobian`).
- A signed parameter made of two keys bends at its default; the Jacobian takes the side that the value is on.
- Each step solves the box-constrained quadratic by projected Newton (Bertsekas 1982, two-metric projection), damped
  as in Levenberg–Marquardt.
- s, the head angles in the offset and the weights are held during a step and renewed after it.
- Outline landmarks of an uncalibrated detector follow the silhouette: when the point turns away from the camera, the
  outermost nearby point of the mesh takes its place ("landmark marching", Zhu et al. 2015, section 3.2).
- The posterior covariance H⁻¹ gives the standard deviations; a parameter whose variance the photo lowers by less than
  `identifiable_information` is not identifiable. It is put back to its default, and the rest is solved again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.fitting.detector_model import DetectorModel
from rigfit.fitting.face_frame import FaceFrame, head_angles, landmark_model
from rigfit.photo import mesh478
from rigfit.render.camera import FULL_FRAME_WIDTH_MM, Camera, rotation_from_vector
from rigfit.rig.blendshapes import PointModel, restrict
from rigfit.rig.spec import RigSpec
from rigfit.rig.surface import in_parts

OUTLINE_STEPS = 4
POSE_SIZE = 7  # rotation (3), shift of the face origin in the picture (2), log scale, log focal length


@dataclass(frozen=True)
class LandmarkFitConfig:
    """How a landmark fit is done."""

    solve: tuple[str, ...] = ("identity", "expression")
    """Groups of parameters that are free; the others keep their default (or locked) value."""
    noise: float = 0.025
    """Assumed detector error of an uncalibrated rig, standard deviation per axis in face units (eye distance)."""
    prior_sd: float = 0.35
    """Prior standard deviation of a parameter, as a share of the way from its default to its farther limit."""
    expression_l1: float = 0.6
    """Weight λ of the sparsity term on expression parameters."""
    student_dof: float = 5.0
    """Degrees of freedom ν of the robust weights; infinity is plain least squares."""
    focal_mm: tuple[float, float, float] = (50.0, 20.0, 250.0)
    """Guess, minimum and maximum of the focal length (36 mm film width) when the photo does not tell."""
    focal_log_sd: float = 0.35
    """Prior standard deviation of log focal length when the photo does not tell."""
    exif_focal_log_sd: float = 0.05
    """The same when EXIF tells (cropped photos and rounded tags)."""
    identifiable_information: float = 0.1
    """Least share of the prior variance that the photo must remove for a parameter to count as identifiable."""
    follow_outline: bool = True
    """Let outline landmarks of an uncalibrated detector follow the silhouette."""
    max_iterations: int = 30
    """Gauss–Newton steps at most, per pass."""
    tolerance: float = 1e-3
    """Stop when a step lowers the cost by less than this share."""


@dataclass(frozen=True)
class Observation:
    """Landmarks of one photo.

    points_px: (478,2) float64 pixels, NaN where missing. weight: (478,) 0…1 confidence of the detector or the user.
    width, height: of the image, pixels. focal_px: from EXIF or the user, pixels, or None.
    """

    points_px: NDArray[np.float64]
    weight: NDArray[np.float64]
    width: int
    height: int
    focal_px: float | None = None


@dataclass(frozen=True)
class PhotoFit:
    """What was found in one photo.

    values: (P,) all parameters in spec order (identity shared). points_px: (478,2) projected landmarks (the points the
    fit compared; NaN where unused). error_px: mean distance to the detected ones. error_percent: the same in % of the
    outer eye distance in the photo. used: (478,) bool. robust_weight: (478,) 0…1. coverage: share of the usable
    landmarks that the fit believed. angles_deg: yaw, pitch, roll.
    """

    camera: Camera
    values: NDArray[np.float64]
    points_px: NDArray[np.float64]
    error_px: float
    error_percent: float
    used: NDArray[np.bool_]
    robust_weight: NDArray[np.float64]
    coverage: float
    angles_deg: tuple[float, float, float]
    focal_from: str


@dataclass(frozen=True)
class LandmarkFit:
    """Result. standard_deviation, information, identifiable: (P,) for the shared identity and the first photo's
    expression; information is the share of the prior variance that the photos removed."""

    photos: list[PhotoFit]
    standard_deviation: NDArray[np.float64]
    information: NDArray[np.float64]
    identifiable: NDArray[np.bool_]
    locked: NDArray[np.bool_]
    cost: float
    iterations: int
    cost_history: list[float] = field(default_factory=list)

    @property
    def values(self) -> NDArray[np.float64]:
        return self.photos[0].values


@dataclass
class _Pose:
    """Pose in the face frame: rotation (3,3), shift_px (2,), log s (pixels per face unit), log f (pixels)."""

    rotation: NDArray[np.float64]
    shift_px: NDArray[np.float64]
    log_scale: float
    log_focal: float

    def moved(self, step: NDArray[np.float64]) -> _Pose:
        return _Pose(
            rotation_from_vector(step[:3]) @ self.rotation,
            self.shift_px + step[3:5],
            self.log_scale + step[5],
            self.log_focal + step[6],
        )

    @property
    def translation(self) -> NDArray[np.float64]:
        scale, focal = np.exp(self.log_scale), np.exp(self.log_focal)
        return np.array([self.shift_px[0] / scale, self.shift_px[1] / scale, focal / scale])


def project_face(points: NDArray[np.float64], pose: _Pose, principal: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L,3) face frame → (L,2) pixels."""
    cam = points @ pose.rotation.T + pose.translation
    return np.exp(pose.log_focal) * cam[:, :2] / np.maximum(cam[:, 2:], 1e-6) + principal


def landmark_jacobian(
    points: NDArray[np.float64], basis: NDArray[np.float64], pose: _Pose
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact derivatives of `project_face`.

    points: (L,3) face frame. basis: (P,L,3) d points / d parameter. Returns (L,2,P) and (L,2,7), the latter for a
    left-multiplied rotation vector, shift_px, log scale and log focal length.
    """
    rotated = points @ pose.rotation.T
    t = pose.translation
    cam = rotated + t
    focal = np.exp(pose.log_focal)
    z = np.maximum(cam[:, 2], 1e-6)
    du = np.zeros((len(points), 2, 3))
    du[:, 0, 0] = du[:, 1, 1] = focal / z
    du[:, :, 2] = -focal * cam[:, :2] / z[:, None] ** 2
    by_parameter = np.einsum("lic,plc->lip", du @ pose.rotation, basis, optimize=True)
    by_pose = np.empty((len(points), 2, POSE_SIZE))
    for axis in range(3):
        by_pose[:, :, axis] = np.einsum("lic,lc->li", du, np.cross(np.eye(3)[axis], rotated))
    by_pose[:, :, 3:5] = du[:, :, :2] / np.exp(pose.log_scale)
    # t = (a/s, b/s, f/s): lowering log s or raising log f moves the face away; f also magnifies.
    by_pose[:, :, 5] = -du @ t
    by_pose[:, :, 6] = du[:, :, 2] * t[2] + focal * cam[:, :2] / z[:, None]
    return by_parameter, by_pose


def bounded_quadratic(
    hessian: NDArray[np.float64],
    gradient: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    max_iterations: int = 60,
) -> NDArray[np.float64]:
    """argmin ½ xᵀHx + gᵀx with lower ≤ x ≤ upper, H (n,n) positive definite, 0 feasible. Projected Newton (Bertsekas 1982)."""
    x = np.zeros(len(gradient))
    for _ in range(max_iterations):
        slope = hessian @ x + gradient
        held = ((x <= lower) & (slope > 0)) | ((x >= upper) & (slope < 0))
        free = ~held
        if not free.any() or np.abs(np.where(held, 0, slope)).max() < 1e-9 * (1 + np.abs(gradient).max()):
            break
        factor = scipy.linalg.cho_factor(hessian[np.ix_(free, free)], check_finite=False)
        direction = np.zeros_like(x)
        direction[free] = -scipy.linalg.cho_solve(factor, slope[free], check_finite=False)
        value = x @ (0.5 * (hessian @ x) + gradient)
        length = 1.0
        while True:
            trial = np.clip(x + length * direction, lower, upper)
            better = trial @ (0.5 * (hessian @ trial) + gradient)
            if better <= value + 1e-4 * (slope @ (trial - x)) or length < 1e-6:
                break
            length *= 0.5
        if np.abs(trial - x).max() < 1e-12:
            break
        x = trial
    return x


class _Moving:
    """Points that the free parameters move; the others are folded into the base. Flat arrays: this is the hot path."""

    def __init__(self, model: PointModel, free: NDArray[np.intp], start: NDArray[np.float64]) -> None:
        fixed = start.copy()
        fixed[free] = model.default[free]
        self.free, self.default = free, model.default[free]
        self.base = model.points(fixed).ravel()
        self.positive = np.ascontiguousarray(model.positive[free].reshape(len(free), -1))
        self.negative = np.ascontiguousarray(model.negative[free].reshape(len(free), -1))
        self.same = bool(np.array_equal(self.positive, self.negative))

    def points(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P,) values → (L,3)."""
        offset = values[self.free] - self.default
        if self.same:
            return (self.base + offset @ self.positive).reshape(-1, 3)
        moved = np.maximum(offset, 0) @ self.positive + np.minimum(offset, 0) @ self.negative
        return (self.base + moved).reshape(-1, 3)

    def slope(self, values: NDArray[np.float64], side: NDArray[np.int8]) -> NDArray[np.float64]:
        """(n,L,3) derivative for the free parameters. side: (n,) what a parameter at its default can do: 1, −1, 0 both."""
        offset = values[self.free] - self.default
        way = np.where(np.abs(offset) < 1e-9, side, np.sign(offset))
        slope = self.positive.copy()
        if not self.same:
            slope[way < 0] = self.negative[way < 0]
            both = way == 0
            slope[both] = 0.5 * (self.positive[both] + self.negative[both])
        return slope.reshape(len(slope), -1, 3)


class _Photo:
    """One photo inside the solver: its measurements, its pose, its expression."""

    def __init__(self, observation: Observation, points: PointModel, config: LandmarkFitConfig) -> None:
        usable = np.isfinite(points.neutral).all(axis=1) & np.isfinite(observation.points_px).all(axis=1)
        usable &= observation.weight > 0
        if usable.sum() < 12:
            raise UserError(
                f"Only {int(usable.sum())} landmarks are known in the photo and on the rig, at least 12 are needed: "
                "give more points, or embed landmarks on the rig with `rigfit rig landmarks`.",
                kind="too_few_landmarks",
            )
        self.observation = observation
        self.index = np.flatnonzero(usable)
        self.detected = observation.points_px[self.index]
        self.confidence = observation.weight[self.index]
        self.principal = np.array([observation.width / 2, observation.height / 2])
        per_mm = max(observation.width, observation.height) / FULL_FRAME_WIDTH_MM
        guess, low, high = (np.log(mm * per_mm) for mm in config.focal_mm)
        if observation.focal_px:
            guess, self.focal_sd, self.focal_from = np.log(observation.focal_px), config.exif_focal_log_sd, "exif"
            low, high = min(low, guess), max(high, guess)
        else:
            self.focal_sd, self.focal_from = config.focal_log_sd, "solved"
        self.focal_guess, self.focal_limits = guess, (low, high)
        self.pose = self._first_pose(points)
        self.robust = np.ones(len(self.index))

    def _first_pose(self, points: PointModel) -> _Pose:
        """Closed form: affine camera by least squares, its nearest scaled rotation (weak perspective)."""
        stable = np.isin(self.index, mesh478.STABLE)
        rows = stable if stable.sum() >= 8 else np.ones(len(self.index), bool)
        model, seen = points.neutral[self.index][rows], self.detected[rows]
        centre, middle = model.mean(axis=0), seen.mean(axis=0)
        affine = np.linalg.lstsq(model - centre, seen - middle, rcond=None)[0].T
        u, s, vt = np.linalg.svd(affine, full_matrices=False)
        two = u @ vt
        scale = float(s.mean())
        rotation = np.vstack([two, np.cross(two[0], two[1])])
        shift = middle - self.principal - scale * (rotation @ centre)[:2]
        return _Pose(rotation, shift, float(np.log(max(scale, 1e-6))), float(self.focal_guess))

    def pose_bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = np.full(POSE_SIZE, -np.inf), np.full(POSE_SIZE, np.inf)
        # One step must not overshoot far: angles by 0.5 rad, scale by a factor 2.
        low[:3], high[:3], low[5], high[5] = -0.5, 0.5, -0.7, 0.7
        low[6] = min(self.focal_limits[0] - self.pose.log_focal, 0.0)
        high[6] = max(self.focal_limits[1] - self.pose.log_focal, 0.0)
        return low, high


class _Solver:
    def __init__(
        self,
        spec: RigSpec,
        observations: Sequence[Observation],
        config: LandmarkFitConfig,
        locked: Mapping[str, float],
        initial: Mapping[str, float],
    ) -> None:
        if not observations:
            raise UserError("No photo was given: name at least one.", kind="no_photo")
        self.config = config
        on_rig = landmark_model(spec)
        self.frame = FaceFrame.from_landmarks(on_rig.neutral)
        self.points = PointModel(
            neutral=self.frame.to_face(on_rig.neutral),
            positive=self.frame.direction_to_face(on_rig.positive),
            negative=self.frame.direction_to_face(on_rig.negative),
            default=on_rig.default,
        )
        parameters = spec.parameters
        self.names = [p.name for p in parameters]
        self.default = np.array([p.default for p in parameters])
        self.lower = np.array([p.minimum for p in parameters])
        self.upper = np.array([p.maximum for p in parameters])
        self.detector = detector_model(spec, config, self.points.neutral)
        self.mean, self.sd = self.default.copy(), self.detector.sd.copy()
        group = np.array([p.group for p in parameters])
        self.locked = np.zeros(len(parameters), bool)
        self.start = self.default.copy()
        self._set_named(initial, "initial")
        self._set_named(locked, "locked")
        self.locked[[self.names.index(n) for n in locked]] = True
        touches = np.abs(self.points.positive).max(axis=(1, 2), initial=0) > 1e-9
        touches |= np.abs(self.points.negative).max(axis=(1, 2), initial=0) > 1e-9
        self.free = np.isin(group, config.solve) & ~self.locked & touches & (self.upper > self.lower)
        self.expression = group == "expression"
        self.shared = np.flatnonzero(~self.expression)
        self.own = np.flatnonzero(self.expression)
        self.photos = [_Photo(o, self.points, config) for o in observations]
        for photo in self.photos:
            photo.pose.log_focal = float(np.clip(photo.pose.log_focal, *photo.focal_limits))
        self.values = np.tile(self.start, (len(self.photos), 1))
        free = np.flatnonzero(self.free)
        self.moving = _Moving(self.points, free, self.start)
        self.column = np.cumsum(self.free) - 1
        at = self.default[free]
        self.side = (self.lower[free] >= at).astype(np.int8) - (self.upper[free] <= at).astype(np.int8)
        follow = config.follow_outline and not self.detector.calibrated
        self.marching = _Outline(spec, self.frame, on_rig, free, self.start) if follow else None
        self.cost_history: list[float] = []

    def _set_named(self, values: Mapping[str, float], what: str) -> None:
        for name, value in values.items():
            if name not in self.names:
                raise UserError(
                    f"The {what} parameter {name!r} is not in this rig: see `rigfit rig inspect` for the names.",
                    kind="unknown_parameter",
                )
            j = self.names.index(name)
            if not (np.isfinite(value) and self.lower[j] - 1e-6 <= value <= self.upper[j] + 1e-6):
                raise UserError(
                    f"The {what} value {value:g} of {name!r} is outside its limits {self.lower[j]:g} … {self.upper[j]:g}.",
                    kind="outside_limits",
                )
            self.start[j] = np.clip(value, self.lower[j], self.upper[j])

    # --- one photo's part of the normal equations -------------------------------------------------------------

    def _geometry(self, k: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(l,3) landmarks of photo k in the face frame for (P,) values."""
        photo = self.photos[k]
        points = self.moving.points(values)[photo.index]
        if self.marching is not None:
            points = self.marching.replace(points, photo.index, values, k)
        return points

    def _residual(
        self, k: int, values: NDArray[np.float64], pose: _Pose, held: tuple[float, float, float, float]
    ) -> NDArray[np.float64]:
        """(l,2) (detected − projected)/s in the roll-free frame, minus the expected offset. held: s, yaw, pitch, roll."""
        photo = self.photos[k]
        scale, yaw, pitch, roll = held
        seen = (photo.detected - project_face(self._geometry(k, values), pose, photo.principal)) / scale
        offset = self.detector.offset(yaw, pitch, values)[photo.index]
        return seen @ _unroll(roll).T - offset

    def _precision(self, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Woodbury parts of (W⁻¹ (U Uᵀ + D) W⁻¹)⁻¹ for photo k: weights (2l,), U (2l,K), cholesky of I + Uᵀ D⁻¹ U."""
        photo = self.photos[k]
        rows = np.stack([2 * photo.index, 2 * photo.index + 1], axis=1).ravel()
        # A landmark that is not believed has a larger own variance; what it shares with its neighbours stays.
        weight = np.repeat(photo.robust * photo.confidence, 2) / self.detector.noise_diagonal[rows]
        factor = self.detector.noise_factor[rows]
        inner = scipy.linalg.cholesky(np.eye(factor.shape[1]) + factor.T @ (weight[:, None] * factor), lower=True)
        return weight, factor, inner

    def _held(self, pose: _Pose) -> tuple[float, float, float, float]:
        yaw, pitch, roll = head_angles(pose.rotation)
        # Past these angles the learned bias would be an extrapolation.
        return float(np.exp(pose.log_scale)), float(np.clip(yaw, -0.8, 0.8)), float(np.clip(pitch, -0.5, 0.5)), roll

    def _prior(self, values: NDArray[np.float64]) -> float:
        """Prior cost of (K,P) values: identity once, expression per photo."""
        q = (values - self.mean) / self.sd
        one = np.where(self.free, q**2, 0.0)
        sparse = np.where(self.free & self.expression, np.abs(q), 0.0) * self.config.expression_l1
        return float(one[0, self.shared].sum() + one[:, self.own].sum() + 2 * sparse.sum())

    def _focal_prior(self, k: int, pose: _Pose) -> float:
        photo = self.photos[k]
        return float(((pose.log_focal - photo.focal_guess) / photo.focal_sd) ** 2)

    def _cost(self, values, poses, held, precision) -> float:
        total = self._prior(values)
        for k, pose in enumerate(poses):
            r = self._residual(k, values[k], pose, held[k]).ravel()
            weight, factor, inner = precision[k]
            projected = scipy.linalg.solve_triangular(inner, factor.T @ (weight * r), lower=True, check_finite=False)
            total += float(r @ (weight * r) - projected @ projected) + self._focal_prior(k, pose)
        return total

    def _normal_equations(self, free: NDArray[np.bool_], held, precision):
        """H (n,n) and g (n,) of the linearised cost over [free shared | per photo: free own, pose]."""
        shared = self.shared[free[self.shared]]
        own = self.own[free[self.own]]
        block = len(own) + POSE_SIZE
        n = len(shared) + block * len(self.photos)
        hessian, gradient = np.zeros((n, n)), np.zeros(n)
        for k, photo in enumerate(self.photos):
            values, pose = self.values[k], photo.pose
            scale, _, _, roll = held[k]
            columns = np.concatenate([shared, own])
            taken = self.column[columns]
            slope = self.moving.slope(values, self.side)[np.ix_(taken, photo.index)]
            points = self._geometry(k, values)
            if self.marching is not None and len(columns):
                slope = self.marching.replace_slope(slope, photo.index, taken, values, self.side, k)
            by_parameter, by_pose = landmark_jacobian(points, slope, pose)
            jac = np.concatenate([by_parameter, by_pose], axis=2) / scale
            jac = np.einsum("ij,ljn->lin", _unroll(roll), jac, optimize=True)
            response = self.detector.response[columns][:, photo.index] / self.detector.sd[columns, None, None]
            jac[:, :, : len(columns)] += response.transpose(1, 2, 0)
            jac = jac.reshape(-1, jac.shape[2])
            r = self._residual(k, values, pose, held[k]).ravel()
            weight, factor, inner = precision[k]
            weighted = weight[:, None] * jac
            common = scipy.linalg.solve_triangular(inner, factor.T @ weighted, lower=True, check_finite=False)
            common_r = scipy.linalg.solve_triangular(inner, factor.T @ (weight * r), lower=True, check_finite=False)
            part = jac.T @ weighted - common.T @ common
            slope_part = -(weighted.T @ r - common.T @ common_r)
            first = len(shared) + k * block
            where = np.concatenate([np.arange(len(shared)), np.arange(first, first + block)])
            hessian[np.ix_(where, where)] += part
            gradient[where] += slope_part
            diagonal = np.arange(first, first + len(own))
            q = (values[own] - self.mean[own]) / self.sd[own]
            hessian[diagonal, diagonal] += 1 / self.sd[own] ** 2
            gradient[diagonal] += q / self.sd[own]
            # |p − d| has a slope of ±1; at the default the bound or the other side decides, so 0 for signed ones.
            sign = np.sign(values[own] - self.default[own])
            sign = np.where((sign == 0) & (self.lower[own] >= self.default[own]), 1.0, sign)
            gradient[diagonal] += self.config.expression_l1 * sign / self.sd[own]
            hessian[first + block - 1, first + block - 1] += 1 / photo.focal_sd**2
            gradient[first + block - 1] += (pose.log_focal - photo.focal_guess) / photo.focal_sd**2
        diagonal = np.arange(len(shared))
        hessian[diagonal, diagonal] += 1 / self.sd[shared] ** 2
        gradient[diagonal] += (self.values[0, shared] - self.mean[shared]) / self.sd[shared] ** 2
        return hessian, gradient, shared, own

    def _bounds(self, shared, own):
        low, high = [self.lower[shared] - self.values[0, shared]], [self.upper[shared] - self.values[0, shared]]
        for k, photo in enumerate(self.photos):
            pose_low, pose_high = photo.pose_bounds()
            low += [self.lower[own] - self.values[k, own], pose_low]
            high += [self.upper[own] - self.values[k, own], pose_high]
        return np.minimum(np.concatenate(low), 0), np.maximum(np.concatenate(high), 0)

    def _take(self, step, shared, own):
        """The state after a step: new (K,P) values inside the limits, and poses."""
        values, poses = self.values.copy(), []
        values[:, shared] += step[: len(shared)]
        block = len(own) + POSE_SIZE
        for k, photo in enumerate(self.photos):
            first = len(shared) + k * block
            values[k, own] += step[first : first + len(own)]
            poses.append(photo.pose.moved(step[first + len(own) : first + block]))
        return np.clip(values, self.lower, self.upper), poses

    def _renew_weights(self) -> None:
        """Student-t weights from each landmark's own residual (what its neighbours share does not count against it)."""
        for k, photo in enumerate(self.photos):
            r = self._residual(k, self.values[k], photo.pose, self._held(photo.pose))
            weight, factor, inner = self._precision(k)
            shared = factor @ scipy.linalg.cho_solve((inner, True), factor.T @ (weight * r.ravel()), check_finite=False)
            rows = np.stack([2 * photo.index, 2 * photo.index + 1], axis=1)
            m2 = np.sum((r - shared.reshape(-1, 2)) ** 2 / self.detector.noise_diagonal[rows], axis=1)
            nu = self.config.student_dof
            photo.robust = np.ones(len(m2)) if np.isinf(nu) else np.minimum((nu + 2) / (nu + m2), 1.0)

    def run(self, free: NDArray[np.bool_], max_iterations: int, tolerance: float) -> int:
        """Gauss–Newton over the free parameters and all poses; returns the number of steps."""
        damping, steps = 1e-3, 0
        for iteration in range(max_iterations):
            # Choosing outline points anew for ever could alternate between two choices and never end.
            if self.marching is not None and iteration < OUTLINE_STEPS:
                for k, photo in enumerate(self.photos):
                    self.marching.follow(k, photo, self.values[k])
            held = [self._held(p.pose) for p in self.photos]
            precision = [self._precision(k) for k in range(len(self.photos))]
            now = self._cost(self.values, [p.pose for p in self.photos], held, precision)
            self.cost_history.append(now)
            hessian, gradient, shared, own = self._normal_equations(free, held, precision)
            low, high = self._bounds(shared, own)
            while True:
                damped = hessian + damping * np.diag(np.diag(hessian))
                step = bounded_quadratic(damped, gradient, low, high)
                values, poses = self._take(step, shared, own)
                then = self._cost(values, poses, held, precision)
                if then < now or damping > 1e6:
                    break
                damping *= 8
            steps += 1
            if not then < now:
                break
            self.values = values
            for photo, pose in zip(self.photos, poses, strict=True):
                photo.pose = pose
            damping = max(damping / 6, 1e-6)
            self._renew_weights()
            if now - then < tolerance * now:
                break
        return steps

    def posterior(self, free: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(P,) standard deviation of the shared identity and the first photo's expression, camera marginalised."""
        held = [self._held(p.pose) for p in self.photos]
        precision = [self._precision(k) for k in range(len(self.photos))]
        hessian, _, shared, own = self._normal_equations(free, held, precision)
        covariance = np.linalg.inv(hessian + 1e-12 * np.eye(len(hessian)))
        sd = self.sd.copy()
        sd[~free] = np.where(self.locked[~free], 0.0, self.sd[~free])
        deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
        sd[shared] = deviation[: len(shared)]
        sd[own] = deviation[len(shared) : len(shared) + len(own)]
        return sd


def _unroll(roll: float) -> NDArray[np.float64]:
    """(2,2) rotation that takes image vectors of a rolled head to the upright head."""
    c, s = np.cos(roll), np.sin(roll)
    return np.array([[c, s], [-s, c]])


def prior_sd(spec: RigSpec, share: float) -> NDArray[np.float64]:
    """(P,) prior standard deviation: `share` of the way from the default to the farther limit."""
    reach = [max(p.maximum - p.default, p.default - p.minimum) for p in spec.parameters]
    return np.maximum(share * np.array(reach), 1e-6)


def detector_model(
    spec: RigSpec, config: LandmarkFitConfig, neutral_face: NDArray[np.float64] | None = None
) -> DetectorModel:
    """The spec's calibrated detector model, or the assumed one. neutral_face: (478,3) neutral landmarks, face frame."""
    if spec.detector:
        return DetectorModel.from_arrays(spec.detector, len(spec.parameters))
    if neutral_face is None:
        points = landmark_model(spec).neutral
        neutral_face = FaceFrame.from_landmarks(points).to_face(points)
    defaults = np.array([p.default for p in spec.parameters])
    return DetectorModel.uncalibrated(neutral_face, defaults, prior_sd(spec, config.prior_sd), config.noise)


class _Outline:
    """Outline landmarks of an uncalibrated rig follow the silhouette.

    Candidates for a landmark are mesh vertices in the same direction from the middle of the face (as seen from the
    front), up to `REACH` face units away from it. When the landmark's normal turns away from the camera the candidate
    that lies outermost in the picture takes its place, until the next step.
    """

    REACH, HALF_ANGLE = 0.55, np.radians(5.0)

    def __init__(
        self, spec: RigSpec, frame: FaceFrame, on_rig: PointModel, free: NDArray[np.intp], start: NDArray[np.float64]
    ) -> None:
        vertices = frame.to_face(spec.neutral)
        neutral = frame.to_face(on_rig.neutral)
        skin = np.unique(spec.triangles[in_parts(spec, "skin")])
        polar = np.arctan2(vertices[skin, 1], vertices[skin, 0])
        self.candidates: dict[int, NDArray[np.intp]] = {}
        for landmark in mesh478.FACE_OVAL:
            if not np.isfinite(neutral[landmark]).all():
                continue
            angle = np.arctan2(neutral[landmark, 1], neutral[landmark, 0])
            apart = np.abs((polar - angle + np.pi) % (2 * np.pi) - np.pi)
            near = np.linalg.norm(vertices[skin] - neutral[landmark], axis=1) < self.REACH
            self.candidates[landmark] = skin[(apart < self.HALF_ANGLE) & near]
        used = np.unique(np.concatenate([np.zeros(0, np.intp), *self.candidates.values()]))
        self.row_of = {int(v): i for i, v in enumerate(used)}
        # A vertex is a barycentric point: the first corner of any triangle that has it.
        corner_triangle = np.zeros(len(spec.neutral), np.int64)
        corner_slot = np.zeros(len(spec.neutral), np.int64)
        for slot in range(3):
            corner_triangle[spec.triangles[:, slot]] = np.arange(len(spec.triangles))
            corner_slot[spec.triangles[:, slot]] = slot
        at = restrict(spec, corner_triangle[used].astype(np.int32), np.eye(3)[corner_slot[used]])
        model = PointModel(
            frame.to_face(at.neutral),
            frame.direction_to_face(at.positive),
            frame.direction_to_face(at.negative),
            at.default,
        )
        self.moving = _Moving(model, free, start)
        self.outward = {
            landmark: model.neutral[[self.row_of[int(v)] for v in rows]].mean(axis=0) * (1, 1, 0)
            for landmark, rows in self.candidates.items()
            if len(rows)
        }
        triangles = spec.triangles[spec.landmarks.triangle] if spec.landmarks is not None else np.zeros((0, 3), int)
        corners = vertices[triangles]
        normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        self.normal = normal / np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-12)
        self.taken: dict[int, dict[int, int]] = {}

    def follow(self, k: int, photo: _Photo, values: NDArray[np.float64]) -> None:
        """Choose the candidates of photo k for the present pose and values."""
        taken: dict[int, int] = {}
        pixels = project_face(self.moving.points(values), photo.pose, photo.principal)
        middle = project_face(np.zeros((1, 3)), photo.pose, photo.principal)[0]
        view = -photo.pose.translation @ photo.pose.rotation
        view = view / np.linalg.norm(view)
        for landmark, outward in self.outward.items():
            if self.normal[landmark] @ view > 0.15:
                continue
            rows = np.array([self.row_of[int(v)] for v in self.candidates[landmark]])
            flat = (photo.pose.rotation @ outward)[:2]
            taken[landmark] = int(rows[np.argmax((pixels[rows] - middle) @ flat)])
        self.taken[k] = taken

    def _where(self, index: NDArray[np.intp], k: int) -> tuple[NDArray[np.intp], list[int]]:
        taken = self.taken.get(k, {})
        where = np.flatnonzero(np.isin(index, list(taken)))
        return where, [taken[int(i)] for i in index[where]]

    def replace(
        self, points: NDArray[np.float64], index: NDArray[np.intp], values: NDArray[np.float64], k: int
    ) -> NDArray[np.float64]:
        """(l,3) landmarks of photo k with those on the outline moved to their candidates."""
        where, rows = self._where(index, k)
        if len(where):
            points[where] = self.moving.points(values)[rows]
        return points

    def replace_slope(self, slope, index, taken, values, side, k):
        """The same for their derivatives (n,l,3); taken: (n,) which of the free parameters."""
        where, rows = self._where(index, k)
        if len(where):
            slope[:, where] = self.moving.slope(values, side)[np.ix_(taken, rows)]
        return slope


def fit_landmarks(
    spec: RigSpec,
    observations: Sequence[Observation],
    config: LandmarkFitConfig | None = None,
    locked: Mapping[str, float] | None = None,
    initial: Mapping[str, float] | None = None,
) -> LandmarkFit:
    """Fit one person to their photos.

    locked: parameters that keep the given value. initial: where to start (identity and expression by name).
    Raises UserError for an empty or unusable input. Values are always finite and inside their limits.
    """
    config = config or LandmarkFitConfig()
    solver = _Solver(spec, observations, config, locked or {}, initial or {})
    # The camera first, with the face as it is: parameters must not explain what a turn of the head explains.
    solver.run(np.zeros(len(solver.names), bool), 8, 1e-2)
    steps = solver.run(solver.free, config.max_iterations, config.tolerance)
    deviation = solver.posterior(solver.free)
    information = np.where(solver.free, 1 - (deviation / solver.sd) ** 2, 0.0)
    identifiable = solver.free & (information >= config.identifiable_information)
    dropped = solver.free & ~identifiable
    if dropped.any():
        solver.values[:, dropped] = solver.start[dropped]
        steps += solver.run(identifiable, config.max_iterations, config.tolerance)
    return LandmarkFit(
        photos=[_photo_fit(solver, k) for k in range(len(solver.photos))],
        standard_deviation=deviation,
        information=information,
        identifiable=identifiable,
        locked=solver.locked,
        cost=solver.cost_history[-1],
        iterations=steps,
        cost_history=solver.cost_history,
    )


def _photo_fit(solver: _Solver, k: int) -> PhotoFit:
    photo = solver.photos[k]
    values = solver.values[k].copy()
    rotation, translation = solver.frame.camera_to_rig(photo.pose.rotation, photo.pose.translation)
    observation = photo.observation
    camera = Camera(
        observation.width,
        observation.height,
        float(np.exp(photo.pose.log_focal)),
        photo.principal.copy(),
        rotation,
        translation,
    )
    count = len(solver.points.neutral)
    projected = np.full((count, 2), np.nan)
    projected[photo.index] = project_face(solver._geometry(k, values), photo.pose, photo.principal)
    distance = np.linalg.norm(projected[photo.index] - photo.detected, axis=1)
    weight = np.zeros(count)
    weight[photo.index] = photo.robust
    # The eye distance in space, at the scale of the face: a turned head must not make the error look larger.
    corners = solver.points.points(values)[list(mesh478.OUTER_EYE_CORNERS)]
    across = float(np.exp(photo.pose.log_scale) * np.linalg.norm(corners[0] - corners[1]))
    used = np.zeros(count, bool)
    used[photo.index] = True
    yaw, pitch, roll = np.degrees(head_angles(photo.pose.rotation))
    return PhotoFit(
        camera=camera,
        values=values,
        points_px=projected,
        error_px=float(distance.mean()),
        error_percent=100 * float(distance.mean()) / across,
        used=used,
        robust_weight=weight,
        coverage=float((photo.robust > 0.3).mean()),
        angles_deg=(float(yaw), float(pitch), float(roll)),
        focal_from=photo.focal_from,
    )

