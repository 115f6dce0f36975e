# SPDX-License-Identifier: Apache-2.0
"""Make backend/rigfit/assets/default_head_landmarks.npz: landmark embedding and detector model of the default head.

    python scripts/make_head_assets.py --work out/head-assets --blender PATH

Run it after a change of the default head's geometry (the end-to-end test fails until then). About 15 minutes on two
cores; after Ctrl-C the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rigfit.blender.locate import locate
from rigfit.blender.worker import BlenderWorker
from rigfit.console import progress_bar, say, with_exit_codes
from rigfit.fitting.calibrate import calibrate
from rigfit.photo.landmarks import MediapipeDetector
from rigfit.rig import default_rig, known_rigs
from rigfit.rig.embedding import embed_landmarks
from rigfit.rig.spec import RigSpec

COUNT, SEED = 900, 1


@with_exit_codes
def main() -> None:
    parser = argparse.ArgumentParser(description="Make the landmark embedding and detector model of the default head.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the head, the spec and what was detected")
    parser.add_argument("--blender", help="a Blender executable, or a Python that has bpy")
    parser.add_argument("--count", type=int, default=COUNT, help="random faces to render")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    blend, spec_path = options.work / "head.blend", options.work / "head.npz"
    blender, detector = locate(options.blender), MediapipeDetector()
    before = RigSpec.load(spec_path) if spec_path.exists() else None
    with BlenderWorker(blender) as worker, progress_bar("landmarks") as progress:
        spec, _ = default_rig.default_rig(worker, blend, spec_path)
        if before is not None and before.landmarks is not None and before.rig_hash == spec.rig_hash:
            embedding = before.landmarks
        else:
            embedding = embed_landmarks(worker, spec_path, detector, progress)
        spec = spec.with_landmarks(embedding)
        spec.save(spec_path)
    with progress_bar("calibrate") as progress:
        model = calibrate(
            blend,
            spec_path,
            detector,
            count=options.count,
            seed=SEED,
            folder=options.work,
            blender=blender,
            progress=progress,
        )
    target = Path(__file__).parents[1] / "backend" / "rigfit" / "assets" / known_rigs.SHIPPED
    known_rigs.write_shipped(spec.with_detector(model.to_arrays(), {"samples": model.samples}), target)
    say(f"{target}: {model.samples} renders, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
    sys.exit(0)
