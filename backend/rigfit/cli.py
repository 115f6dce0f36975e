# SPDX-License-Identifier: Apache-2.0
"""The command line. Heavy imports stay inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from rigfit.console import progress_bar, say, with_exit_codes
from rigfit.errors import UserError

if TYPE_CHECKING:
    from rigfit.blender.worker import BlenderWorker

app = typer.Typer(
    help="Fit any face rig in Blender to a photo.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
rig_app = typer.Typer(help="Make, export, inspect and calibrate rigs.", no_args_is_help=True)
bench_app = typer.Typer(help="Published measurements, each against its peer in the same run.", no_args_is_help=True)
app.add_typer(rig_app, name="rig")
app.add_typer(bench_app, name="bench")

BlenderOption = Annotated[
    Optional[str],  # noqa: UP045 typer reads the annotation at run time
    typer.Option(
        "--blender", help="A Blender executable, or a Python that has bpy. Default: RIGFIT_BLENDER, bpy, PATH."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Blender processes side by side. Default: the cores, at most 4.")
]


def main() -> None:
    """Entry point of the `rigfit` command."""
    # The matrices are small: BLAS threads that wait for each other make a fit ten times slower on a busy machine.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    with_exit_codes(app)()


def _worker(stack: ExitStack, blender: str | None) -> BlenderWorker:
    from rigfit.blender.locate import locate
    from rigfit.blender.worker import BlenderWorker

    return stack.enter_context(BlenderWorker(locate(blender)))


# --- rig ------------------------------------------------------------------------------------------------------------


@rig_app.command("default")
def rig_default(
    out: Annotated[Path, typer.Argument(help="The .blend file to write.")],
    asymmetric: Annotated[bool, typer.Option(help="Left and right sides get parameters of their own.")] = False,
    blender: BlenderOption = None,
) -> None:
    """Write the default head as a .blend file, with its rig spec beside it (OUT.npz)."""
    from rigfit.rig.default_rig import build_default_blend, default_rig

    _check_output(out, ".blend")
    with ExitStack() as stack:
        worker = _worker(stack, blender)
        if asymmetric:
            build_default_blend(worker, out, asymmetric=True)
            say(f"{out}: the default head, both sides apart. Next: rigfit rig export {out} {out.with_suffix('.npz')}")
            return
        with progress_bar("default head") as progress:
            spec, complete = default_rig(worker, out, out.with_suffix(".npz"), progress)
        say(
            f"{out}: {len(spec.neutral):,} vertices, {len(spec.parameters)} parameters; rig spec {out.with_suffix('.npz')}"
        )
        if not complete:
            say(f"It has no landmarks yet: rigfit rig landmarks {out} {out.with_suffix('.npz')}")


@rig_app.command("export")
def rig_export(
    blend: Annotated[Path, typer.Argument(help="The artist's file.")],
    out: Annotated[Path, typer.Argument(help="The rig spec (.npz) to write.")],
    objects: Annotated[
        list[str] | None,
        typer.Option(
            "--object", help="Mesh to export; repeat for more. Default: all with shape keys, and their parts."
        ),
    ] = None,
    pairs: Annotated[
        bool, typer.Option(help="Opposite keys (-decr/-incr, -in/-out …) become one signed parameter.")
    ] = True,
    landmarks: Annotated[bool, typer.Option(help="Also find the face landmarks on the rig.")] = True,
    blender: BlenderOption = None,
) -> None:
    """Export the rig of a .blend file as a rig spec and embed the face landmarks."""
    _check_output(out, ".npz")
    with ExitStack() as stack:
        worker = _worker(stack, blender)
        worker.call("file.open", path=blend)
        with progress_bar("export") as progress:
            told = worker.call("rig.export", progress=progress, out=str(out), objects=objects, pairs=pairs)
        say(
            f"{out}: {told['vertices']:,} vertices, {told['triangles']:,} triangles, {_count(told['parameters'])} parameters"
        )
        for left in told["left_out"]:
            say(f"  left out: {left['name']}: {left['reason']}")
        for warning in told["warnings"]:
            say(f"  note: {warning}")
        if landmarks:
            _embed(worker, out)


def _count(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else int(value)  # type: ignore[call-overload]


def _embed(worker: BlenderWorker, spec_path: Path) -> None:
    """The landmarks of the rig that is open in `worker`: those that are known already, else found on it."""
    from rigfit.rig.known_rigs import known_rig
    from rigfit.rig.spec import RigSpec

    known = known_rig(RigSpec.load(spec_path))
    if known is None:
        _find_landmarks(worker, spec_path)
        return
    spec, origin = known
    spec.save(spec_path)
    if origin == "shipped":
        say(f"{spec_path}: this is the default head; its landmarks and detector model come with rigfit")
    else:
        what = "landmarks and detector model are" if spec.detector else "landmarks are"
        say(f"{spec_path}: this rig's {what} known from before (`rigfit rig landmarks` looks for them anew)")


def _find_landmarks(worker: BlenderWorker, spec_path: Path) -> None:
    """Find the landmarks on the rig that is open in `worker` and write them into its spec."""
    from rigfit.photo.landmarks import MediapipeDetector
    from rigfit.rig.embedding import embed_landmarks
    from rigfit.rig.known_rigs import keep
    from rigfit.rig.spec import RigSpec

    spec = RigSpec.load(spec_path)
    with progress_bar("landmarks") as progress:
        embedding = embed_landmarks(worker, spec_path, MediapipeDetector(), progress)
    found_spec = spec.with_landmarks(embedding)
    found_spec.save(spec_path)
    keep(found_spec)
    found = embedding.triangle >= 0
    confidence = embedding.confidence[found].mean()
    say(f"{spec_path}: {int(found.sum())} of {len(found)} landmarks embedded, mean confidence {confidence:.2f}")


@rig_app.command("landmarks")
def rig_landmarks(
    blend: Annotated[Path, typer.Argument(help="The artist's file.")],
    spec: Annotated[Path, typer.Argument(help="Its rig spec; the landmarks are written into it.")],
    blender: BlenderOption = None,
) -> None:
    """Find the face landmarks on the rig: render it from several sides, detect, cast back onto the mesh."""
    from rigfit.rig.spec import RigSpec

    RigSpec.load(spec)  # a bad spec is said before Blender starts
    with ExitStack() as stack:
        worker = _worker(stack, blender)
        worker.call("file.open", path=blend)
        _find_landmarks(worker, spec)


@rig_app.command("calibrate")
def rig_calibrate(
    blend: Annotated[Path, typer.Argument(help="The artist's file.")],
    spec: Annotated[Path, typer.Argument(help="Its rig spec with landmarks; the detector model is written into it.")],
    count: Annotated[int, typer.Option(help="Random faces to render.")] = 900,
    seed: Annotated[int, typer.Option(help="Seed of the random faces.")] = 1,
    size_px: Annotated[int, typer.Option(help="Size of the renders.")] = 256,
    samples: Annotated[int, typer.Option(help="Cycles samples a pixel, denoised.")] = 4,
    work: Annotated[
        Path | None, typer.Option(help="Folder that lets an interrupted run go on. Default: beside the spec.")
    ] = None,
    workers: WorkersOption = None,
    blender: BlenderOption = None,
) -> None:
    """Learn how the landmark detector errs on this rig, from renders of it. Go on with the same command after Ctrl-C."""
    from rigfit.blender.locate import locate
    from rigfit.fitting.calibrate import calibrate
    from rigfit.photo.landmarks import MediapipeDetector
    from rigfit.rig.known_rigs import keep
    from rigfit.rig.spec import RigSpec

    rig = RigSpec.load(spec)
    with progress_bar("calibrate") as progress:
        model = calibrate(
            blend, spec, MediapipeDetector(), count=count, seed=seed, size_px=size_px, samples=samples, workers=workers,
            folder=work or spec.with_suffix(".calibration"), blender=locate(blender), progress=progress,
        )  # fmt: skip
    about = {"samples": model.samples, "seed": seed, "size_px": size_px, "cycles_samples": samples}
    calibrated = rig.with_detector(model.to_arrays(), about)
    calibrated.save(spec)
    keep(calibrated)
    noise = 100 * (model.noise_diagonal + (model.noise_factor**2).sum(axis=2)) ** 0.5
    say(f"{spec}: detector calibrated on {model.samples} renders; noise left {noise.mean():.2f} % of the eye distance")


@rig_app.command("inspect")
def rig_inspect(
    spec: Annotated[Path, typer.Argument(help="A rig spec (.npz).")],
    out: Annotated[Optional[Path], typer.Option(help="Picture to write. Default: SPEC with .png.")] = None,  # noqa: UP045
    parameters: Annotated[bool, typer.Option(help="List the parameters.")] = True,
) -> None:
    """Show what is in a rig spec: a picture of the mesh with its landmarks, and the parameters."""
    from rich.console import Console
    from rich.table import Table

    from rigfit.files import write_atomically
    from rigfit.rig.inspect import inspect_picture
    from rigfit.rig.spec import RigSpec

    rig = RigSpec.load(spec)
    picture = inspect_picture(rig)
    target = out or spec.with_suffix(".png")
    write_atomically(target, lambda path: picture.save(path, format="PNG"))
    if parameters:
        table = Table("parameter", "group", "minimum", "maximum", "default", "sources", title=str(spec))
        for p in rig.parameters:
            sources = ", ".join(f"{s.object}: {s.key or s.property}" for s in p.sources)
            table.add_row(p.name, p.group, f"{p.minimum:g}", f"{p.maximum:g}", f"{p.default:g}", sources)
        Console().print(table)
    state = "calibrated" if rig.detector else "not calibrated (rigfit rig calibrate)"
    say(
        f"from {rig.source or 'unknown'} by Blender {rig.blender_version or '?'}, rig hash {rig.rig_hash[:12]}, detector {state}"
    )
    for item in rig.left_out:
        say(f"  left out: {item.name}: {item.reason}")
    for warning in rig.warnings:
        say(f"  note: {warning}")
    say(f"picture: {target}")


# --- fit ------------------------------------------------------------------------------------------------------------


@app.command()
def fit(
    photos: Annotated[list[Path], typer.Argument(help="Photos of one person.")],
    rig: Annotated[Optional[Path], typer.Option(help="Rig spec (.npz). Default: the default head.")] = None,  # noqa: UP045
    blend: Annotated[
        Path | None, typer.Option(help="The rig's .blend: a fitted copy is written, and Blender renders it.")
    ] = None,
    lock: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE keeps a parameter at a value, NAME at its default; repeat.")
    ] = None,
    solve: Annotated[str, typer.Option(help="both, identity or expression.")] = "both",
    face: Annotated[Optional[int], typer.Option(min=0, help="Which face, 0 is the largest.")] = None,  # noqa: UP045
    landmarks: Annotated[
        list[Path] | None, typer.Option(help="Landmark file (JSON) instead of the detector, one a photo.")
    ] = None,
    initial: Annotated[Optional[Path], typer.Option(help="Fit result to start from.")] = None,  # noqa: UP045
    focal_mm: Annotated[
        float | None, typer.Option(help="Focal length, 35 mm equivalent. Default: EXIF, else solved.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("fit"),
    blender: BlenderOption = None,
) -> None:
    """Fit a rig to one or more photos of a person: parameters as JSON, a comparison picture, a fitted .blend."""
    from rigfit.fitting.run import FitJob, run_fit

    if solve not in ("both", "identity", "expression"):
        raise UserError(f"--solve {solve} is not known: use both, identity or expression.", kind="bad_option")
    groups = ("identity", "expression") if solve == "both" else (solve,)
    job = FitJob(
        photos=photos, rig=rig, blend=blend, locks=lock or [], groups=groups, face=face, landmark_files=landmarks or [],
        initial=initial, focal_mm=focal_mm, out=out, blender=blender,
    )  # fmt: skip
    with progress_bar("fit") as progress:
        done = run_fit(job, progress)
    for line in done.summary():
        say(line)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo"),
    photo: Annotated[Optional[Path], typer.Option(help="Another photo than the demo's.")] = None,  # noqa: UP045
    blender: BlenderOption = None,
) -> None:
    """Fit the default head to a real photo (NASA's portrait of Eileen Collins) and show the result."""
    from rigfit.fitting.run import FitJob, demo_photo, run_fit

    with progress_bar("demo") as progress:
        job = FitJob(photos=[photo or demo_photo(out)], out=out, blender=blender, keep_head=True)
        done = run_fit(job, progress)
    for line in done.summary():
        say(line)


@app.command()
def serve(
    address_file: Annotated[Path, typer.Option(help="Where to write at which port it listens.")],
    attach: Annotated[
        bool, typer.Option("--attach", help="Run by hand in a terminal: the address file holds the token, too.")
    ] = False,
    idle_s: Annotated[float, typer.Option(min=1, help="End after so long without a client, in seconds.")] = 1800.0,
    log: Annotated[Optional[Path], typer.Option(help="Log file. Default: in the user's cache folder.")] = None,  # noqa: UP045
) -> None:
    """Answer Blender's add-on over a local socket (docs/protocol.md). The add-on starts this by itself."""
    from rigfit.server.process import serve as run

    run(address_file, attach=attach, idle_s=idle_s, log_path=log)


@app.command()
def doctor(
    json_form: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False, blender: BlenderOption = None
) -> None:
    """Check this machine: Python, packages, models, Blender, assets; with a fix for each thing that fails."""
    from rigfit import doctor as checks

    raise SystemExit(checks.run(json_form=json_form, blender=blender))


# --- bench ----------------------------------------------------------------------------------------------------------


@bench_app.command("recovery")
def bench_recovery(
    count: Annotated[int, typer.Option(min=1, help="Random held-out faces.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the faces.")] = 7,
    method: Annotated[str, typer.Option(help="landmarks.")] = "landmarks",
    rig: Annotated[Optional[Path], typer.Option(help="Rig spec. Default: the default head.")] = None,  # noqa: UP045
    blend: Annotated[Optional[Path], typer.Option(help="Its .blend file.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="Result file (.json).")] = None,  # noqa: UP045
    keep: Annotated[Optional[Path], typer.Option(help="Folder that keeps the pictures.")] = None,  # noqa: UP045
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")] = False,
    workers: WorkersOption = None,
    blender: BlenderOption = None,
) -> None:
    """Random faces rendered by Blender, fitted from the pictures alone, compared with the truth."""
    from rigfit.bench.recovery import recovery
    from rigfit.bench.report import finish
    from rigfit.blender.locate import locate
    from rigfit.fitting.run import ensure_rig
    from rigfit.photo.landmarks import MediapipeDetector

    if method != "landmarks":
        raise UserError(f"--method {method} is not known: use landmarks.", kind="bad_option")
    found = locate(blender)
    with progress_bar("recovery") as progress:
        blend, rig = ensure_rig(rig, blend, found, progress)
        measured = recovery(
            blend, rig, MediapipeDetector(), count=count, seed=seed, method=method, blender=found, workers=workers,
            progress=progress, keep=keep,
        )  # fmt: skip
    raise SystemExit(
        finish(
            "recovery",
            measured.figures,
            rows=measured.rows,
            details=measured.faces,
            settings={"count": count, "seed": seed, "method": method},
            out=out,
            check=check,
        )
    )


def _check_output(path: Path, suffix: str) -> None:
    """Say before the work, not after it, that the output cannot be written."""
    if path.suffix != suffix:
        raise UserError(f"{path} must end in {suffix}.", kind="bad_option")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: make it or choose another.", kind="file_unwritable")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable: choose another folder.", kind="file_unwritable")


if __name__ == "__main__":
    main()
