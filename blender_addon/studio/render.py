# SPDX-License-Identifier: GPL-3.0-or-later
"""Render the open rig to a PNG with Cycles: the same picture for the same request, cheaply."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

import bpy

from ..messages import RigError
from .scene import studio_scene, without_subsurface

DEFAULT_SAMPLES = 16
GPU_TYPES = ("OPTIX", "CUDA", "HIP", "METAL", "ONEAPI")


def render(
    camera: dict,
    out: str,
    *,
    light: dict | None = None,
    background: Iterable[float] | None = None,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    hide: Iterable[str] | None = None,
    objects: Iterable[str] | None = None,
    transparent: bool = False,
    denoise: bool = False,
    subsurface: bool = True,
    gpu: bool = False,
    threads: int | None = None,
) -> dict:
    """Render the rig of the open file through `camera` and write an 8-bit PNG (sRGB, Standard view transform).

    camera, light, background, objects, hide: see `scene.studio_scene`. samples: rays a pixel, 1…4096. seed: of the
    noise, 0…2³¹−1; the same seed gives the same picture. transparent: no background, RGBA with straight alpha.
    denoise: Open Image Denoise over the result, where this Blender has it (Debian's has not); off by default because it
    smooths what training data should keep.
    subsurface: False leaves out the light that travels under the skin: on the default head half the time and less
    noise, for a mean difference of half a grey level.
    gpu: use one if there is one. threads: CPU threads, all by default.
    Returns {"seconds": render and write, "device": "cpu" | "gpu", "denoised": bool}.
    RigError bad_request, bad_camera, bad_light, nothing_to_render, no_cycles, render_failed, file_unwritable.
    The file is written under a temporary name in its folder and renamed; the open file is unchanged.
    """
    _check_options(samples, seed, threads)
    started = time.perf_counter()
    out = os.path.abspath(out)
    with (
        _written(out) as temporary,
        _render_result_gone(),
        studio_scene(camera, light=light, background=background, objects=objects, hide=hide) as scene,
        _cycles_device(scene, gpu) as device,
        contextlib.nullcontext() if subsurface else without_subsurface(scene),
    ):
        denoised = _set_engine(scene, samples, seed, denoise, threads)
        _set_picture(scene, transparent)
        try:
            bpy.ops.render.render(scene=scene.name)
        except RuntimeError as error:
            raise RigError("render_failed", reason=" ".join(str(error).split())) from None
        # Not `write_still`: it reads # as a frame number and {…} as a template in the path.
        bpy.data.images["Render Result"].save_render(temporary, scene=scene)
    return {"seconds": time.perf_counter() - started, "device": device, "denoised": denoised}


def _check_options(samples: int, seed: int, threads: int | None) -> None:
    for name, value, low, high in (
        ("samples", samples, 1, 4096),
        ("seed", seed, 0, 2**31 - 1),
        ("threads", threads, 1, 1024),
    ):
        if name == "threads" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RigError(
                "bad_request", method="studio.render", reason=f"{name} must be a whole number from {low} to {high}"
            )


def _set_engine(scene: bpy.types.Scene, samples: int, seed: int, denoise: bool, threads: int | None) -> bool:
    """Cycles with settings for faces; returns whether the picture will be denoised."""
    try:
        scene.render.engine = "CYCLES"
    except TypeError:
        raise RigError("no_cycles") from None
    cycles = scene.cycles
    cycles.samples = samples
    cycles.seed = seed
    cycles.use_animated_seed = False
    cycles.use_adaptive_sampling = False
    cycles.time_limit = 0.0
    # A face needs light that bounced once between its own surfaces; more is invisible under an area light.
    cycles.max_bounces = 3
    cycles.diffuse_bounces = 2
    cycles.glossy_bounces = 1
    cycles.transmission_bounces = 2
    cycles.volume_bounces = 0
    cycles.transparent_max_bounces = 8
    cycles.caustics_reflective = False
    cycles.caustics_refractive = False
    cycles.sample_clamp_indirect = 4.0
    cycles.use_auto_tile = False
    if denoise:
        try:
            cycles.denoiser = "OPENIMAGEDENOISE"
        except TypeError:
            denoise = False
    cycles.use_denoising = denoise
    # On a face at 8 samples: a third of the cost of the best quality for 0.4 grey levels more error.
    for name, value in (("denoising_quality", "FAST"), ("denoising_prefilter", "FAST")):
        if denoise and hasattr(cycles, name):
            setattr(cycles, name, value)
    render = scene.render
    render.use_persistent_data = False
    render.use_motion_blur = False
    render.use_freestyle = False
    render.use_compositing = False
    render.use_sequencer = False
    if threads is not None:
        render.threads_mode = "FIXED"
        render.threads = threads
    return denoise


def _set_picture(scene: bpy.types.Scene, transparent: bool) -> None:
    scene.display_settings.display_device = "sRGB"
    view = scene.view_settings
    view.view_transform = "Standard"
    view.look = "None"
    view.exposure = 0.0
    view.gamma = 1.0
    render = scene.render
    render.film_transparent = transparent
    render.dither_intensity = 0.0
    render.use_stamp = False
    render.use_border = False
    render.pixel_aspect_x = render.pixel_aspect_y = 1.0
    form = render.image_settings
    form.file_format = "PNG"
    form.color_mode = "RGBA" if transparent else "RGB"
    form.color_depth = "8"
    form.compression = 15


@contextlib.contextmanager
def _cycles_device(scene: bpy.types.Scene, gpu: bool) -> Iterator[str]:
    """Choose the device; yields "gpu" or "cpu". The user's Cycles preferences are as before when the context ends."""
    addon = bpy.context.preferences.addons.get("cycles")
    if not gpu or addon is None:
        yield "cpu"
        return
    preferences = addon.preferences
    kind_before = preferences.compute_device_type
    used_before: list[tuple[object, bool]] = []
    try:
        found = False
        for kind in GPU_TYPES:
            try:
                preferences.compute_device_type = kind
            except TypeError:
                # Not in this build.
                continue
            preferences.refresh_devices()
            devices = list(preferences.get_devices_for_type(kind))
            if any(device.type == kind for device in devices):
                used_before = [(device, device.use) for device in devices]
                for device in devices:
                    device.use = device.type == kind
                found = True
                break
        if found:
            scene.cycles.device = "GPU"
        yield "gpu" if found else "cpu"
    finally:
        for device, use in used_before:
            device.use = use  # type: ignore[attr-defined]
        preferences.compute_device_type = kind_before


@contextlib.contextmanager
def _render_result_gone() -> Iterator[None]:
    """Remove the picture datablock that a render leaves in the file, unless it was there before."""
    before = {image.name for image in bpy.data.images}
    try:
        yield
    finally:
        image = bpy.data.images.get("Render Result")
        if image is not None and image.name not in before:
            bpy.data.images.remove(image)


@contextlib.contextmanager
def _written(out: str) -> Iterator[str]:
    """A temporary name beside `out` that becomes `out` if the block ends well and wrote something."""
    temporary = os.path.join(os.path.dirname(out), f".rigfit-{os.getpid()}.tmp.png")
    try:
        try:
            if os.path.isdir(out):
                raise IsADirectoryError(21, "it is a folder")
            # Tried before the render, which may take a while.
            with open(temporary, "wb"):
                pass
        except OSError as error:
            raise RigError("file_unwritable", path=out, reason=error.strerror or str(error)) from None
        yield temporary
        try:
            # Blender does not say when it fails to write a picture.
            if os.path.getsize(temporary) == 0:
                raise OSError(28, "Blender wrote no picture; is the disk full?")
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, out)
        except OSError as error:
            raise RigError("file_unwritable", path=out, reason=error.strerror or str(error)) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
