# SPDX-License-Identifier: Apache-2.0
"""A fit from start to end, as the command line runs it: rig, photos, solver, Blender, pictures, files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rigfit.blender.locate import Blender, locate
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.files import make_folder
from rigfit.fitting.compare import comparison, save_comparison
from rigfit.fitting.fit_photos import fit_seen_faces, see_face, verify
from rigfit.fitting.landmark_fit import LandmarkFitConfig
from rigfit.fitting.result import FitResult
from rigfit.photo.landmarks import MediapipeDetector
from rigfit.rig.default_rig import cache_folder, default_rig
from rigfit.rig.embedding import embed_landmarks
from rigfit.rig.spec import RigSpec

Progress = Callable[[int, int, str], None]
STEPS = 6


@dataclass(frozen=True)
class FitJob:
    """What to fit. locks: "NAME=VALUE" or "NAME". keep_head: put the default head into `out`."""

    photos: list[Path]
    rig: Path | None = None
    blend: Path | None = None
    locks: list[str] = field(default_factory=list)
    groups: tuple[str, ...] = ("identity", "expression")
    face: int | None = None
    landmark_files: list[Path] = field(default_factory=list)
    initial: Path | None = None
    focal_mm: float | None = None
    out: Path = Path("fit")
    blender: str | None = None
    keep_head: bool = False


@dataclass(frozen=True)
class FitDone:
    """Where the results are."""

    result: FitResult
    result_file: Path
    pictures: list[Path]
    blend: Path | None
    seconds: float

    def summary(self) -> list[str]:
        lines = []
        for photo in self.result.photos:
            line = (
                f"{photo.path}: landmark error {photo.landmark_error_px:.1f} px = "
                f"{photo.landmark_error_percent:.1f} % of the eye distance"
            )
            check = photo.verification
            if check is not None:
                told = (
                    f"{check.landmark_error_percent:.1f} %"
                    if check.landmark_error_percent is not None
                    else "no face found on it"
                )
                line += f"; on Blender's render: {told}"
            lines.append(line)
            lines += [f"  note: {warning}" for warning in photo.warnings]
        known = sum(p.identifiable for p in self.result.parameters.values())
        lines.append(f"{known} of {len(self.result.parameters)} parameters determined; {self.seconds:.1f} s in all")
        lines.append(f"result:  {self.result_file}")
        lines += [f"picture: {picture}" for picture in self.pictures]
        if self.blend is not None:
            lines.append(f"blend:   {self.blend}")
        return lines


def run_fit(job: FitJob, progress: Progress) -> FitDone:
    """Fit, verify in Blender where a .blend is at hand, write `fit.json`, `comparison*.png` and `fitted.blend` to job.out."""
    start = time.perf_counter()
    if job.landmark_files and len(job.landmark_files) != len(job.photos):
        raise UserError(
            f"{len(job.landmark_files)} landmark files for {len(job.photos)} photos: give one for each.",
            kind="bad_option",
        )
    if job.blend is not None and job.rig is None:
        raise UserError(
            "A .blend without its rig spec: add --rig SPEC.npz, made by `rigfit rig export`.", kind="bad_option"
        )
    make_folder(job.out)
    needs_blender = job.rig is None or job.blend is not None
    found = locate(job.blender) if needs_blender else None
    blend, spec_path = job.blend, job.rig
    if job.rig is None:
        own = job.out if job.keep_head else None
        blend, spec_path = ensure_rig(None, None, found, progress, own)
    assert spec_path is not None
    spec = RigSpec.load(spec_path)
    progress(1, STEPS, "loading the landmark detector")
    detector = MediapipeDetector()
    seen = []
    for i, path in enumerate(job.photos):
        progress(2, STEPS, f"looking at {path.name}")
        file = job.landmark_files[i] if job.landmark_files else None
        seen.append(see_face(path, detector, face=job.face, landmark_file=file))
    initial = {}
    if job.initial is not None:
        before = FitResult.load(job.initial)
        before.check_rig(spec)
        initial = before.values()
    progress(3, STEPS, "solving")
    result, fit = fit_seen_faces(
        spec, seen, LandmarkFitConfig(solve=job.groups), _parse_locks(job.locks, spec), initial, job.focal_mm
    )
    fitted: Path | None = None
    renders: list[Path | None] = [None] * len(seen)
    if blend is not None:
        progress(4, STEPS, "Blender applies and renders the result")
        with BlenderWorker(found) as worker:
            worker.call("file.open", path=str(blend))
            for i in reversed(range(len(seen))):
                render = job.out / (f"render-{i + 1}.png" if len(seen) > 1 else "render.png")
                camera = result.photos[i].camera
                check = verify(worker, spec_path, result.values(i), camera, seen[i].face, detector, render)
                result = result.with_verification(i, check)
                renders[i] = render
            fitted = job.out / "fitted.blend"
            worker.call("file.save", path=str(fitted))
    progress(5, STEPS, "drawing the comparison")
    pictures = []
    for i, one in enumerate(seen):
        picture = job.out / (f"comparison-{i + 1}.png" if len(seen) > 1 else "comparison.png")
        save_comparison(picture, comparison(one, result, i, fit.photos[i].points_px, renders[i]))
        pictures.append(picture)
    file = job.out / "fit.json"
    result.save(file)
    progress(STEPS, STEPS, "done")
    return FitDone(result, file, pictures, fitted, time.perf_counter() - start)


def ensure_rig(
    rig: Path | None, blend: Path | None, blender: Blender | None, progress: Progress, folder: Path | None = None
) -> tuple[Path, Path]:
    """The given .blend and spec, or those of the default head, built on first use in `folder` or the user's cache."""
    if (rig is None) != (blend is None):
        raise UserError("Give the rig spec and its .blend together (--rig and --blend), or neither.", kind="bad_option")
    if rig is not None and blend is not None:
        return blend, rig
    folder = folder or cache_folder()
    blend, rig = folder / "default_head.blend", folder / "default_head.npz"
    if folder == cache_folder() and blend.exists() and rig.exists():
        try:
            RigSpec.load(rig)
            return blend, rig
        except UserError:
            pass  # damaged: make it again
    make_folder(folder)
    with BlenderWorker(blender) as worker:
        spec, complete = default_rig(worker, blend, rig, progress)
        if not complete:
            spec.with_landmarks(embed_landmarks(worker, rig, MediapipeDetector(), progress)).save(rig)
    return blend, rig


def demo_photo(folder: Path) -> Path:
    """Write the demo photo (NASA's portrait of Eileen Collins, public domain) into `folder` and return its path."""
    from importlib import resources

    make_folder(folder)
    target = folder / "photo.png"
    with resources.as_file(resources.files("rigfit") / "assets" / "astronaut.png") as source:
        shutil.copyfile(source, target)
    return target


def _parse_locks(locks: list[str], spec: RigSpec) -> dict[str, float]:
    parsed = {}
    defaults = {p.name: p.default for p in spec.parameters}
    for lock in locks:
        name, equals, text = lock.rpartition("=")
        if not equals or lock in defaults:
            name, text = lock, ""
        try:
            parsed[name] = float(text) if text else defaults[name]
        except KeyError:
            raise UserError(
                f"The parameter {name!r} to lock is not in this rig: `rigfit rig inspect` lists them.",
                kind="unknown_parameter",
            ) from None
        except ValueError:
            raise UserError(f"--lock {lock}: {text!r} is not a number.", kind="bad_option") from None
    return parsed
