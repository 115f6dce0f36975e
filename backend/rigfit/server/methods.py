# SPDX-License-Identifier: Apache-2.0
"""What each job does. Imported and called in the job thread only: the imports below take longer than a hello may."""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

import rigfit
from rigfit import doctor
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.files import user_cache
from rigfit.fitting import compare, fit_photos
from rigfit.fitting.landmark_fit import LandmarkFitConfig
from rigfit.fitting.prepared import prepare
from rigfit.fitting.result import FitResult
from rigfit.photo.face import FaceLandmarks
from rigfit.photo.landmarks import MediapipeDetector
from rigfit.rig.default_rig import cache_folder, default_description
from rigfit.rig.embedding import embed_landmarks
from rigfit.rig.known_rigs import keep, known_rig
from rigfit.rig.spec import RigSpec
from rigfit.server.jobs import JobContext
from rigfit.server.messages import (
    BadParamsError,
    CheckResult,
    DefaultRigParams,
    DefaultRigResult,
    DoctorParams,
    DoctorResult,
    FitParams,
    FitResultMessage,
    Params,
    RegisterParams,
    RegisterResult,
    Result,
    VerifyParams,
    VerifyResult,
)

if TYPE_CHECKING:
    from rigfit.fitting.landmark_fit import PhotoFit

log = logging.getLogger("rigfit.server")

PICTURE_PX = 384
# Denoised, and without light under the skin: a fifth of the time of a full render, for half a grey level.
CHECK_SAMPLES = 12
# Half the time of the command line's 16; the landmarks differ by 0.05 mm (median).
LANDMARK_SAMPLES = 6
KEPT_RIGS = 4
KEPT_FITS = 4

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Answer:
    """What a job returns. blobs: uint8 arrays."""

    result: Result
    blobs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class KeptFit:
    """What `verify` needs of a fit, without its photos, which may be large. pictures: the squares around the faces."""

    spec: RigSpec
    result: FitResult
    faces: list[FaceLandmarks]
    pictures: list[Image.Image]


class Recent(OrderedDict[K, V]):
    """The last few things by key."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def remember(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


class Methods:
    """The jobs of one backend, and what it remembers between them."""

    def __init__(self) -> None:
        self._detector = MediapipeDetector()
        self._rigs: Recent[str, RigSpec] = Recent(KEPT_RIGS)
        self._fits: Recent[str, KeptFit] = Recent(KEPT_FITS)
        self._jobs: dict[str, Callable[[Any, JobContext], Answer]] = {
            "doctor": self.doctor,
            "rig.default": self.default_rig,
            "rig.register": self.register,
            "fit": self.fit,
            "verify": self.verify,
        }

    def warm_up(self) -> None:
        """Load what every fit needs and try it once, so that the first fit does not wait for it."""
        self._detector.load()
        with resources.as_file(resources.files("rigfit") / "assets" / "astronaut.png") as path:
            seen = fit_photos.see_face(path, self._detector)
        built = cache_folder() / "default_head.npz"
        if not built.is_file():
            return
        try:
            known = known_rig(RigSpec.load(built))
        except UserError:
            return  # damaged; whoever needs it makes it again
        if known is not None:
            spec = known[0]
            self._rigs.remember(spec.rig_hash, spec)
            fit_photos.fit_seen_faces(spec, [seen], LandmarkFitConfig(max_iterations=1))

    def run(self, method: str, params: Params, context: JobContext) -> Answer:
        """Do a job. UserError, BadParamsError, Cancelled."""
        self._detector.check = context.check
        try:
            return self._jobs[method](params, context)
        finally:
            self._detector.check = None

    # --- the jobs -----------------------------------------------------------------------------------------------------

    def doctor(self, params: DoctorParams, context: JobContext) -> Answer:
        checks = doctor.run_checks(
            blender=params.blender,
            folder=_existing(user_cache()),
            open_blender=lambda named: context.blender(None if named is None else str(named)),
            progress=context.progress,
        )
        context.check()
        return _answer(
            DoctorResult(
                checks=[CheckResult(name=c.name, status=c.status, found=c.found, fix=c.fix) for c in checks],
                version=rigfit.__version__,
            )
        )

    def default_rig(self, params: DefaultRigParams, context: JobContext) -> Answer:
        context.progress(0, 1, "preparing the default head")
        path = context.apart(lambda: default_description(asymmetric=params.asymmetric))
        return _answer(DefaultRigResult(description=str(path)))

    def register(self, params: RegisterParams, context: JobContext) -> Answer:
        context.progress(0, 0, "reading the rig")
        spec = RigSpec.load(params.spec)
        known = known_rig(spec)
        if known is not None:
            spec, origin = known
            if origin == "spec":
                keep(spec)
        elif params.blend is None:
            raise UserError(
                "This rig's landmarks are not known yet: send its .blend with it, to look for them.", kind="needs_blend"
            )
        else:
            spec, origin = self._found(spec, params, context), "found"
        context.progress(0, 0, "preparing the rig")
        # A detector model that does not fit the rig is said now, and the first fit does not pay for this.
        config = LandmarkFitConfig()
        prepare(spec, config.noise, config.prior_sd)
        context.check()
        self._rigs.remember(spec.rig_hash, spec)
        assert spec.landmarks is not None
        return _answer(
            RegisterResult(
                rig_hash=spec.rig_hash,
                parameters=len(spec.parameters),
                landmarks=int((spec.landmarks.triangle >= 0).sum()),
                calibrated=bool(spec.detector),
                origin=origin,
                warnings=list(spec.warnings),
            )
        )

    def _found(self, spec: RigSpec, params: RegisterParams, context: JobContext) -> RigSpec:
        """The spec with landmarks that are looked for on renders of the .blend."""
        with _spec_file(spec) as spec_path, context.blender(params.blender) as worker:
            _open_rig(worker, params, context)
            spec = spec.with_landmarks(
                embed_landmarks(worker, spec_path, self._detector, context.progress, samples=LANDMARK_SAMPLES)
            )
        keep(spec)
        return spec

    def fit(self, params: FitParams, context: JobContext) -> Answer:
        spec = self._rigs.get(params.rig_hash)
        if spec is None:
            raise UserError("This rig is not known to the backend: register it again.", kind="unknown_rig")
        self._rigs.remember(params.rig_hash, spec)
        steps = len(params.photos) + 2
        seen = []
        for i, photo in enumerate(params.photos):
            path = Path(photo.path)
            context.progress(i, steps, f"looking at {path.name}")
            file = None if photo.landmark_file is None else Path(photo.landmark_file)
            seen.append(fit_photos.see_face(path, self._detector, face=photo.face, landmark_file=file))
        context.progress(steps - 2, steps, "solving")
        groups = ("identity", "expression") if params.solve == "both" else (params.solve,)
        config = LandmarkFitConfig(solve=groups)
        result, fit = fit_photos.fit_seen_faces(
            spec, seen, config, params.locks, params.initial, params.focal_mm, context.check
        )
        context.progress(steps - 1, steps, "drawing the pictures")
        blobs: dict[str, np.ndarray] = {}
        pictures = []
        for i, (one, solved) in enumerate(zip(seen, fit.photos, strict=True)):
            blobs |= _pictures(i, one, solved)
            pictures.append(compare.face_picture(one, solved.camera, fit_photos.VERIFY_SIZE_PX))
        context.check()
        fit_id = secrets.token_hex(8)
        self._fits.remember(fit_id, KeptFit(spec, result, [one.face for one in seen], pictures))
        return Answer(FitResultMessage(fit_id=fit_id, fit=result.to_json()), blobs)

    def verify(self, params: VerifyParams, context: JobContext) -> Answer:
        kept = self._fits.get(params.fit_id)
        if kept is None:
            raise UserError("The backend no longer knows this fit: fit again.", kind="unknown_fit")
        if params.photo >= len(kept.faces):
            raise BadParamsError(f"verify: photo: this fit has {len(kept.faces)} photos.")
        spec = kept.spec
        if params.spec is not None:
            # The same rig, but perhaps with objects of other names.
            spec = RigSpec.load(params.spec)
            kept.result.check_rig(spec)
        face, picture = kept.faces[params.photo], kept.pictures[params.photo]
        with tempfile.TemporaryDirectory(prefix="rigfit-verify-") as folder, _spec_file(spec) as spec_path:
            render = Path(folder) / "render.png"
            with context.blender(params.blender) as worker:
                _open_rig(worker, params, context)
                check = fit_photos.verify(
                    worker, spec_path, params.values, kept.result.photos[params.photo].camera, face, self._detector,
                    render, samples=CHECK_SAMPLES, subsurface=False, gpu=params.gpu, progress=context.progress,
                )  # fmt: skip
            layer = compare.read_render(render)
        context.check()
        return Answer(
            VerifyResult(
                face_found=check.face_found,
                landmark_error_percent=check.landmark_error_percent,
                blender_version=check.blender_version,
                seconds=check.seconds,
            ),
            {"render": np.asarray(layer), "over": np.asarray(compare.render_over(layer, picture))},
        )


def _answer(result: Result) -> Answer:
    return Answer(result, {})


def _pictures(i: int, seen: fit_photos.SeenFace, solved: PhotoFit) -> dict[str, np.ndarray]:
    """`photo_i` and `landmarks_i`, uint8 (PICTURE_PX,PICTURE_PX,3)."""
    photo = compare.face_picture(seen, solved.camera, PICTURE_PX)
    marked = compare.with_landmarks(photo, seen.face, solved.camera, solved.points_px)
    return {f"photo_{i}": np.asarray(photo), f"landmarks_{i}": np.asarray(marked)}


@contextlib.contextmanager
def _spec_file(spec: RigSpec) -> Iterator[Path]:
    """The spec as a file for Blender, which reads no other form of it."""
    with tempfile.TemporaryDirectory(prefix="rigfit-spec-") as folder:
        path = Path(folder) / "rig.npz"
        # What was learned is of no use there, and most of the bytes.
        spec.with_landmarks(None).save(path)
        yield path


def _open_rig(worker: BlenderWorker, params: RegisterParams | VerifyParams, context: JobContext) -> None:
    """Open the .blend of a request in the worker: a library file with the rig's objects, or a whole file."""
    context.progress(0, 0, "opening the rig")
    if params.objects is None:
        worker.call("file.open", path=params.blend)
    else:
        worker.call(
            "file.append",
            path=params.blend,
            objects=params.objects,
            metres_per_unit=params.metres_per_unit if params.metres_per_unit is not None else 1.0,
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())
