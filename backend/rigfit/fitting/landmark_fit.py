# SPDX-License-Identifier: Apache-2.0
"""Landmarks → face parameters and camera: bounded, regularised, robust Gauss–Newton.

Unknowns: identity parameters, shared by all photos of a person; per photo the expression parameters, head rotation,
position and focal length. Everything is solved in the face frame (`face_frame.py`), so that a rig in centimetres,
lying on its back, gives the same numbers. Minimised is

    Σ_photos  rᵀ W (U Uᵀ + D)⁻¹ W r   +   (p − d)ᵀ P (p − d)   +   2 λ Σ_expression |p_j − d_j| / sd_j   +   focal prior

with r = (detected − projected) / s in face units, subject to every parameter's own limits. The maximum a posteriori view of it: Gaussian prior, Gaussian detector noise with Student-t
weights (Lange et al. 1989, eq. 8: w = (ν + 2) / (ν + m²), m the Mahalanobis distance of a landmark in 2D).

- The mesh is linear in the parameters, so the projection's Jacobian is exact (`landmark_jacobian`).
- A signed parameter made of two keys bends at its default; the Jacobian takes the side that the value is on.
- Each step solves the box-constrained quadratic by projected Newton (Bertsekas 1982, two-metric projection), damped
  as in Levenberg–Marquardt.
- s, the head angles in the offset and the weights are held during a step and renewed after it.
- Outline landmarks of an uncalibrated detector follow the silhouette: when the point turns away from the camera, the
  outermost nearby point of the mesh takes its place ("landmark marching", Zhu et al. 2015, section 3.2).
- On a calibrated rig the landmarks are explained by the learned response (`detector_model.py`) at the pose of the neutral
  face, which makes the cost quadratic; then a last pass returns to geometry, with the posterior of the learned one as
  its prior, so that the landmarks of a real photo, which no render is, still count as they are.
- The posterior covariance H⁻¹ gives the standard deviations; a parameter whose variance the photo lowers by less than
  `identifiable_information` is not identifiable. It is put back to its default, and the rest is solved again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.fitting.bounded import bounded_quadratic
from rigfit.fitting.detector_model import DetectorModel, pose_basis
from rigfit.fitting.face_frame import head_angles
from rigfit.fitting.moving_points import MovingPoints
from rigfit.fitting.outline import Outline
from rigfit.fitting.prepared import prepare
from rigfit.fitting.projection import POSE_SIZE, Pose, landmark_jacobian, project_face
from rigfit.photo import mesh478
from rigfit.render.camera import FULL_FRAME_WIDTH_MM, Camera
from rigfit.rig.blendshapes import PointModel
from rigfit.rig.spec import RigSpec

# The outline is chosen anew in this many first steps of a pass.
OUTLINE_STEPS = 4
GEOMETRY_STEPS = 6
# Steps at most and tolerance when only the pose is solved.
POSE_PASS = (12, 1e-4)


@dataclass(frozen=True)
class LandmarkFitConfig:
    """How a landmark fit is done."""

    solve: tuple[str, ...] = ("identity", "expression")
    """Groups of parameters that are free; the others keep their default (or locked) value."""
    noise: float = 0.025
    """Assumed detector error of an uncalibrated rig, standard deviation per axis in face units (eye distance)."""
    geometry_noise: float = 0.1
    """The same for the last pass of a calibrated rig, which pulls the learned result towards the landmarks as they are."""
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
    width, height: of the image, pixels. focal_px: from EXIF or the user, pixels, or None. depth_px: (478,) relative depth
    from the detector, larger is further away, any origin; used on rigs whose detector model knows it.
    """

    points_px: NDArray[np.float64]
    weight: NDArray[np.float64]
    width: int
    height: int
    focal_px: float | None = None
    depth_px: NDArray[np.float64] | None = None


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


class _Photo:
    """One photo inside the solver: its measurements, its pose, its expression."""

    def __init__(
        self, observation: Observation, points: PointModel, config: LandmarkFitConfig, use_depth: bool = False
    ) -> None:
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
        self.depth: NDArray[np.float64] | None = None
        depth = observation.depth_px
        if use_depth and depth is not None and np.isfinite(depth[self.index]).all():
            self.depth = depth[self.index] - depth[self.index].mean()
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
        # (l,C) of the learned model: (detected − projected neutral face) / s, image axes; set by `start_learned`.
        self.residual = np.zeros((len(self.index), 2))
        # Of the learned model too: own variances and shared factors, and (C·l,P) change per unit of each parameter.
        self.noise: tuple[NDArray[np.float64], NDArray[np.float64]] = (np.zeros(0), np.zeros((0, 0)))
        self.response: NDArray[np.float64] = np.zeros((0, 0))

    def _first_pose(self, points: PointModel) -> Pose:
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
        return Pose(rotation, shift, float(np.log(max(scale, 1e-6))), float(self.focal_guess))

    def pose_bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = np.full(POSE_SIZE, -np.inf), np.full(POSE_SIZE, np.inf)
        # One step must not overshoot far: angles by 0.5 rad, scale by a factor 2.
        low[:3], high[:3], low[5], high[5] = -0.5, 0.5, -0.7, 0.7
        low[6] = min(self.focal_limits[0] - self.pose.log_focal, 0.0)
        high[6] = max(self.focal_limits[1] - self.pose.log_focal, 0.0)
        return low, high


@dataclass(frozen=True)
class _Held:
    """What stays fixed during a step: s (pixels per face unit), the angles that the bias depends on, the rotation."""

    scale: float
    yaw: float
    pitch: float
    rotation: NDArray[np.float64]

    def turn(self, components: int) -> NDArray[np.float64]:
        """(3,C): face-frame row vectors times this are image vectors, with depth if C is 3."""
        return self.rotation.T[:, :components]


@dataclass(frozen=True)
class _Precision:
    """Inverse covariance of a photo's m measurements: weight (m,), factor U (m,K), inner = chol(I + Uᵀ diag(weight) U),
    own (m,) variances without the weights."""

    weight: NDArray[np.float64]
    factor: NDArray[np.float64]
    inner: NDArray[np.float64]
    own: NDArray[np.float64]

    def common(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """c with xᵀ Σ⁻¹ y = xᵀ diag(weight) y − c(x)ᵀ c(y). x: (m,) or (m,n)."""
        weighted = self.weight * x if x.ndim == 1 else self.weight[:, None] * x
        return scipy.linalg.solve_triangular(self.inner, self.factor.T @ weighted, lower=True, check_finite=False)

    def shared(self, r: NDArray[np.float64]) -> NDArray[np.float64]:
        """(m,) the part of a residual that the shared factors explain."""
        explained = scipy.linalg.cho_solve((self.inner, True), self.factor.T @ (self.weight * r), check_finite=False)
        return self.factor @ explained


class _Solver:
    def __init__(
        self,
        spec: RigSpec,
        observations: Sequence[Observation],
        config: LandmarkFitConfig,
        locked: Mapping[str, float],
        initial: Mapping[str, float],
        check: Callable[[], None] | None = None,
    ) -> None:
        if not observations:
            raise UserError("No photo was given: name at least one.", kind="no_photo")
        self.config = config
        self.check = check
        rig = prepare(spec, config.noise, config.prior_sd)
        self.frame, self.points, self.detector = rig.frame, rig.points, rig.assumed
        self.calibrated, self.learned = rig.calibrated, False
        known = rig.calibrated or rig.assumed
        parameters = spec.parameters
        self.names = [p.name for p in parameters]
        self.default = np.array([p.default for p in parameters])
        self.lower = np.array([p.minimum for p in parameters])
        self.upper = np.array([p.maximum for p in parameters])
        self.sd, self.prior = known.sd, known.prior_precision
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
        self.photos = [_Photo(o, self.points, config, self.calibrated is not None) for o in observations]
        for photo in self.photos:
            photo.pose.log_focal = float(np.clip(photo.pose.log_focal, *photo.focal_limits))
        self.values = np.tile(self.start, (len(self.photos), 1))
        # The prior: Gaussian around `centre` (K,P), and the sparsity of expressions.
        self.centre = np.tile(self.default, (len(self.photos), 1))
        self.expression_l1 = config.expression_l1
        free = np.flatnonzero(self.free)
        self.moving = MovingPoints(self.points, free, self.start)
        self.column = np.cumsum(self.free) - 1
        at = self.default[free]
        self.side = (self.lower[free] >= at).astype(np.int8) - (self.upper[free] <= at).astype(np.int8)
        follow = rig.outline is not None and config.follow_outline
        self.marching = Outline(rig.outline, free, self.start) if follow and rig.outline else None
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

    def _residual(self, k: int, values: NDArray[np.float64], pose: Pose, held: _Held) -> NDArray[np.float64]:
        """(l,C) face units, image axes: (detected − projected)/s, or what the learned model leaves of the neutral's."""
        photo = self.photos[k]
        if self.learned:
            return photo.residual - self._expected(k, values, held)
        return (photo.detected - project_face(self._geometry(k, values), pose, photo.principal)[:, :2]) / held.scale

    def _expected(self, k: int, values: NDArray[np.float64], held: _Held) -> NDArray[np.float64]:
        """(l,C) what the learned model expects for (P,) values, image axes, face units."""
        photo = self.photos[k]
        bias = np.tensordot(pose_basis(held.yaw, held.pitch), self.detector.bias, 1)[photo.index]
        moved = (photo.response @ (values - self.default)).reshape(photo.residual.shape)
        return bias @ held.turn(photo.residual.shape[1]) + moved

    def start_learned(self) -> None:
        """From here on the calibrated model explains the landmarks, at the pose that fits the neutral face."""
        assert self.calibrated is not None
        self.detector, self.learned = self.calibrated, True
        for photo in self.photos:
            neutral = project_face(self.points.neutral[photo.index], photo.pose, photo.principal)
            seen = photo.detected if photo.depth is None else np.column_stack([photo.detected, photo.depth])
            photo.residual = (seen - neutral[:, : seen.shape[1]]) / np.exp(photo.pose.log_scale)
            # The pose is held from here on, so the model is turned into the picture once.
            photo.noise = self._noise(photo, self._held(photo.pose), seen.shape[1])
            turned = self.detector.response[:, photo.index] @ self._held(photo.pose).turn(seen.shape[1])
            photo.response = np.ascontiguousarray((turned / self.sd[:, None, None]).reshape(len(self.sd), -1).T)

    def end_learned(self, assumed: DetectorModel, free: NDArray[np.bool_]) -> None:
        """Back to geometry, with what the learned model found as the prior: its posterior around its values."""
        held = [self._held(p.pose) for p in self.photos]
        precision = [self._precision(k, h) for k, h in enumerate(held)]
        hessian, _, shared, own = self._normal_equations(free, held, precision)
        posterior = np.diag(1 / self.sd**2)
        # Of the first photo: the others' expressions were seen about as well.
        where = np.concatenate([np.arange(len(shared)), len(shared) + np.arange(len(own))])
        columns = np.concatenate([shared, own])
        posterior[np.ix_(columns, columns)] = hessian[np.ix_(where, where)]
        self.prior, self.centre, self.expression_l1 = posterior, self.values.copy(), 0.0
        self.detector, self.learned = assumed, False

    def _precision(self, k: int, held: _Held) -> _Precision:
        """The inverse of W⁻¹ (U Uᵀ + D) W⁻¹ for photo k, as the parts that Woodbury's identity needs."""
        photo = self.photos[k]
        own, factor = photo.noise if self.learned else self._noise(photo, held, 2)
        # A landmark that is not believed has a larger own variance; what it shares with its neighbours stays.
        weight = np.repeat(photo.robust * photo.confidence, len(own) // len(photo.index)) / own
        information = np.eye(factor.shape[1]) + factor.T @ (weight[:, None] * factor)
        inner = scipy.linalg.cholesky(information, lower=True, check_finite=False)
        return _Precision(weight, factor, inner, own)

    def _noise(self, photo: _Photo, held: _Held, components: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Own variances (C·l,) and shared factors (C·l,K) of a photo's measurements, image axes."""
        turn = held.turn(components)
        # The rotated diagonal is not quite diagonal; what is left out is far below the shared part.
        own = (self.detector.noise_diagonal[photo.index] @ turn**2).ravel()
        factor = np.einsum("lck,ci->lik", self.detector.noise_factor[photo.index], turn, optimize=True)
        if components == 3:
            # The origin of the depth is unknown: all depths may move together.
            origin = np.broadcast_to(np.array([0.0, 0.0, 1.0])[:, None], (len(factor), 3, 1))
            factor = np.concatenate([factor, origin], axis=2)
        return own, factor.reshape(len(own), -1)

    def _held(self, pose: Pose) -> _Held:
        yaw, pitch, _ = head_angles(pose.rotation)
        # Past these angles the learned bias would be an extrapolation.
        return _Held(
            float(np.exp(pose.log_scale)),
            float(np.clip(yaw, -0.8, 0.8)),
            float(np.clip(pitch, -0.5, 0.5)),
            pose.rotation.copy(),
        )

    def _prior(self, values: NDArray[np.float64]) -> float:
        """Prior cost of (K,P) values: identity once, expression per photo."""
        off = values - self.centre
        total = off[0, self.shared] @ self.prior[np.ix_(self.shared, self.shared)] @ off[0, self.shared]
        own = off[:, self.own]
        total += np.sum((own @ self.prior[np.ix_(self.own, self.own)]) * own)
        sparse = np.where(self.free & self.expression, np.abs((values - self.default) / self.sd), 0.0)
        sparse = sparse * self.expression_l1
        return float(total + 2 * sparse.sum())

    def _focal_prior(self, k: int, pose: Pose) -> float:
        photo = self.photos[k]
        return float(((pose.log_focal - photo.focal_guess) / photo.focal_sd) ** 2)

    def _cost(self, values, poses, held, precision) -> float:
        total = self._prior(values)
        for k, pose in enumerate(poses):
            r = self._residual(k, values[k], pose, held[k]).ravel()
            common = precision[k].common(r)
            total += float(r @ (precision[k].weight * r) - common @ common) + self._focal_prior(k, pose)
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
            columns = np.concatenate([shared, own])
            jac = self._jacobian(k, columns, held[k])
            jac = jac.reshape(-1, jac.shape[2])
            r = self._residual(k, values, pose, held[k]).ravel()
            weighted = precision[k].weight[:, None] * jac
            common = precision[k].common(jac)
            part = jac.T @ weighted - common.T @ common
            slope_part = -(weighted.T @ r - common.T @ precision[k].common(r))
            first = len(shared) + k * block
            where = np.concatenate([np.arange(len(shared)), np.arange(first, first + block)])
            hessian[np.ix_(where, where)] += part
            if self.learned:
                hold = np.arange(first + len(own), first + block)
                hessian[hold, hold] += 1.0
            gradient[where] += slope_part
            diagonal = np.arange(first, first + len(own))
            hessian[np.ix_(diagonal, diagonal)] += self.prior[np.ix_(own, own)]
            gradient[diagonal] += self.prior[np.ix_(own, self.own)] @ (values - self.centre[k])[self.own]
            # |p − d| has a slope of ±1; at the default the bound or the other side decides, so 0 for signed ones.
            sign = np.sign(values[own] - self.default[own])
            sign = np.where((sign == 0) & (self.lower[own] >= self.default[own]), 1.0, sign)
            gradient[diagonal] += self.expression_l1 * sign / self.sd[own]
            if not self.learned:
                hessian[first + block - 1, first + block - 1] += 1 / photo.focal_sd**2
                gradient[first + block - 1] += (pose.log_focal - photo.focal_guess) / photo.focal_sd**2
        diagonal = np.arange(len(shared))
        hessian[np.ix_(diagonal, diagonal)] += self.prior[np.ix_(shared, shared)]
        gradient[diagonal] += self.prior[np.ix_(shared, self.shared)] @ (self.values[0] - self.centre[0])[self.shared]
        return hessian, gradient, shared, own

    def _jacobian(self, k: int, columns: NDArray[np.intp], held: _Held) -> NDArray[np.float64]:
        """(l,C,n+7) derivative of what is compared, face units, for n parameters and the pose. The learned model holds
        the pose: its columns are 0."""
        photo, values = self.photos[k], self.values[k]
        if self.learned:
            jac = np.zeros((*photo.residual.shape, len(columns) + POSE_SIZE))
            jac[:, :, : len(columns)] = photo.response[:, columns].reshape(*photo.residual.shape, -1)
            return jac
        taken = self.column[columns]
        slope = np.zeros((0, len(photo.index), 3))
        if len(columns):
            slope = self.moving.slope(values, self.side)[np.ix_(taken, photo.index)]
        if self.marching is not None and len(columns):
            slope = self.marching.replace_slope(slope, photo.index, taken, values, self.side, k)
        by_parameter, by_pose = landmark_jacobian(self._geometry(k, values), slope, photo.pose)
        return np.concatenate([by_parameter, by_pose], axis=2)[:, :2] / held.scale

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

    def _renew_weights(self, known: list[_Precision] | None) -> None:
        """Student-t weights from each landmark's own residual (what its neighbours share does not count against it)."""
        for k, photo in enumerate(self.photos):
            held = self._held(photo.pose)
            r = self._residual(k, self.values[k], photo.pose, held)
            # The learned model's covariance does not change with the step; the geometry's turns with the pose.
            precision = known[k] if known else self._precision(k, held)
            own = (r - precision.shared(r.ravel()).reshape(r.shape)) ** 2 / precision.own.reshape(r.shape)
            # On the scale of a landmark in 2D, whether its depth is known or not.
            m2 = 2 * own.mean(axis=1)
            nu = self.config.student_dof
            photo.robust = np.ones(len(m2)) if np.isinf(nu) else np.minimum((nu + 2) / (nu + m2), 1.0)

    def run(self, free: NDArray[np.bool_], max_iterations: int, tolerance: float) -> int:
        """Gauss–Newton over the free parameters and all poses; returns the number of steps."""
        damping, steps = 1e-3, 0
        for iteration in range(max_iterations):
            if self.check is not None:
                self.check()
            # Choosing outline points anew for ever could alternate between two choices and never end.
            if self.marching is not None and iteration < OUTLINE_STEPS:
                for k, photo in enumerate(self.photos):
                    self.marching.follow(k, photo.pose, photo.principal, self.values[k])
            held = [self._held(p.pose) for p in self.photos]
            precision = [self._precision(k, h) for k, h in enumerate(held)]
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
            self._renew_weights(precision if self.learned else None)
            if now - then < tolerance * now:
                break
        return steps

    def pose_of_neutral(self) -> None:
        """Solve the pose of the neutral face, whatever the start is: the frame of the learned model."""
        kept, self.values = self.values, np.tile(self.default, (len(self.photos), 1))
        moving, self.moving = self.moving, MovingPoints(self.points, np.zeros(0, np.intp), self.default)
        self.run(np.zeros(len(self.names), bool), *POSE_PASS)
        self.values, self.moving = kept, moving

    def posterior(self, free: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(P,) standard deviation of the shared identity and the first photo's expression, camera marginalised."""
        held = [self._held(p.pose) for p in self.photos]
        precision = [self._precision(k, h) for k, h in enumerate(held)]
        hessian, _, shared, own = self._normal_equations(free, held, precision)
        covariance = np.linalg.inv(hessian + 1e-12 * np.eye(len(hessian)))
        sd = self.sd.copy()
        sd[~free] = np.where(self.locked[~free], 0.0, self.sd[~free])
        deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
        sd[shared] = deviation[: len(shared)]
        sd[own] = deviation[len(shared) : len(shared) + len(own)]
        return sd


def fit_landmarks(
    spec: RigSpec,
    observations: Sequence[Observation],
    config: LandmarkFitConfig | None = None,
    locked: Mapping[str, float] | None = None,
    initial: Mapping[str, float] | None = None,
    check: Callable[[], None] | None = None,
) -> LandmarkFit:
    """Fit one person to their photos.

    locked: parameters that keep the given value. initial: where to start (identity and expression by name).
    check: called before each step; what it raises ends the fit.
    Raises UserError for an empty or unusable input. Values are always finite and inside their limits.
    """
    config = config or LandmarkFitConfig()
    solver = _Solver(spec, observations, config, locked or {}, initial or {}, check)
    nothing = np.zeros(len(solver.names), bool)
    learned = solver.calibrated is not None
    assumed = prepare(spec, config.geometry_noise, config.prior_sd).assumed
    # The camera first, with the face as it is: parameters must not explain what a turn of the head explains.
    if learned:
        solver.pose_of_neutral()
        solver.start_learned()
    else:
        solver.run(nothing, *POSE_PASS)
    steps = solver.run(solver.free, config.max_iterations, config.tolerance)
    deviation = solver.posterior(solver.free)
    information = np.where(solver.free, 1 - (deviation / solver.sd) ** 2, 0.0)
    identifiable = solver.free & (information >= config.identifiable_information)
    dropped = solver.free & ~identifiable
    if dropped.any():
        solver.values[:, dropped] = solver.start[dropped]
        steps += solver.run(identifiable, config.max_iterations, config.tolerance)
    if learned:
        solver.end_learned(assumed, identifiable)
        solver.run(nothing, *POSE_PASS)
        solver.run(identifiable, GEOMETRY_STEPS, config.tolerance)
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


def neutral_residual(spec: RigSpec, observation: Observation) -> tuple[NDArray[np.float64], Pose]:
    """What `DetectorModel` is learned from: (478,3) (detected − projected neutral face) / s in the face frame, at the
    pose that fits the neutral face, and that pose. NaN where a landmark is not embedded or its depth is not known."""
    solver = _Solver(spec, [observation], LandmarkFitConfig(follow_outline=False), {}, {})
    solver.pose_of_neutral()
    photo = solver.photos[0]
    residual = np.full((len(observation.points_px), 3), np.nan)
    projected = project_face(solver.points.neutral[photo.index], photo.pose, photo.principal)
    residual[photo.index, :2] = photo.detected - projected[:, :2]
    if observation.depth_px is not None:
        depth = observation.depth_px[photo.index]
        residual[photo.index, 2] = depth - depth.mean() - projected[:, 2]
    return residual / np.exp(photo.pose.log_scale) @ photo.pose.rotation, photo.pose


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
    projected[photo.index] = project_face(solver._geometry(k, values), photo.pose, photo.principal)[:, :2]
    distance = np.linalg.norm(projected[photo.index] - photo.detected[:, :2], axis=1)
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
