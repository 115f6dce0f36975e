# SPDX-License-Identifier: Apache-2.0
"""MediaPipe's face networks on single images: two box detectors and the 478-point face mesh.

The wheel holds both the networks and the calculators around them. They are run as calculator graphs of our own, because
the ready-made ``FaceMesh`` class crops with its own short-range detector, hides the presence score, resamples
without antialiasing and pulls in matplotlib (1 s of import). Everything works offline.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rigfit.errors import UserError

MESH_INPUT_PX = 192
"""Side of the square that the face mesh network sees."""

_TICK_US = 33_333
_stderr_lock = threading.Lock()


@dataclass(frozen=True)
class Detection:
    """One box of a face detector, in pixels of the image that was given (origin top left, edges of pixels).

    box_px: (4,) float64 x0, y0, x1, y1. keypoints_px: (6,) pairs -> (6,2) float64: the person's right eye, left eye,
    nose tip, mouth centre, right ear, left ear. score: 0…1.
    """

    box_px: np.ndarray
    keypoints_px: np.ndarray
    score: float


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Send file descriptor 2 to a scratch file: the C++ side logs there whatever Python's ``sys.stderr`` is.

    The text is shown after all if the block raises, so that nothing that explains a failure is lost.
    """
    with _stderr_lock:
        try:
            saved = os.dup(2)
        except OSError:  # no stderr at all (a windowed parent closed it)
            yield
            return
        with tempfile.TemporaryFile() as scratch:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(scratch.fileno(), 2)
            failed = True
            try:
                yield
                failed = False
            finally:
                os.dup2(saved, 2)
                os.close(saved)
                if failed:
                    scratch.seek(0)
                    os.write(2, scratch.read()[-4000:])


def _framework() -> types.ModuleType:
    """Import MediaPipe's C++ bindings only.

    ``import mediapipe`` itself loads every solution with matplotlib and OpenCV. A package object that has the right
    ``__path__`` lets the submodules be imported without running its ``__init__``; attributes that a later user of the
    real package expects (``mediapipe.solutions``, ``mediapipe.tasks``, ``mediapipe.Image``) are resolved on demand.
    """
    if "mediapipe" not in sys.modules:
        spec = importlib.util.find_spec("mediapipe")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                "The face detector needs the Python package mediapipe 0.10.21, which is not installed: "
                "run `pip install mediapipe==0.10.21`, or give a landmark file.",
                kind="no_detector",
            )
        package = types.ModuleType("mediapipe", "MediaPipe without its solutions (see rigfit.photo.mediapipe_nets).")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        package.__file__ = spec.origin

        def resolve(name: str) -> Any:
            if name == "solutions":
                return importlib.import_module("mediapipe.python.solutions")
            if name == "tasks":
                return importlib.import_module("mediapipe.tasks.python")
            python = sys.modules.get("mediapipe.python")
            if python is None or name.startswith("__") or not hasattr(python, name):
                raise AttributeError(name)
            return getattr(python, name)

        package.__getattr__ = resolve  # type: ignore[attr-defined]
        sys.modules["mediapipe"] = package
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        return importlib.import_module("mediapipe.python")
    except ImportError as error:
        raise UserError(
            f"The face detector (mediapipe) cannot be loaded ({error}): "
            "install the missing system library, or give a landmark file.",
            kind="no_detector",
        ) from error


def _protos(name: str) -> Any:
    """A generated protobuf module of mediapipe (their contents are made at run time: nothing to check statically)."""
    return importlib.import_module(f"mediapipe.{name}")


def _import_options() -> None:
    """An options message whose Python class was never imported is dropped on the way through protobuf."""
    for module in (
        "core.constant_side_packet_calculator_pb2",
        "core.gate_calculator_pb2",
        "core.split_vector_calculator_pb2",
        "tensor.image_to_tensor_calculator_pb2",
        "tensor.inference_calculator_pb2",
        "tensor.tensors_to_detections_calculator_pb2",
        "tensor.tensors_to_floats_calculator_pb2",
        "tensor.tensors_to_landmarks_calculator_pb2",
        "tflite.ssd_anchors_calculator_pb2",
        "util.landmarks_refinement_calculator_pb2",
        "util.non_max_suppression_calculator_pb2",
        "util.thresholding_calculator_pb2",
    ):
        _protos(f"calculators.{module}")


class _Graph:
    """One running calculator graph: feed an image, get the packets of its output streams."""

    def __init__(self, config: Any, outputs: list[str]) -> None:
        from mediapipe.python._framework_bindings import calculator_graph  # pyright: ignore

        self._packets: dict[str, Any] = {}
        self._time_us = 0
        self._lock = threading.Lock()
        self._graph = calculator_graph.CalculatorGraph(graph_config=config)
        for name in outputs:
            self._graph.observe_output_stream(name, self._packets.__setitem__, True)
        self._graph.start_run({})

    def run(self, image: np.ndarray) -> dict[str, Any]:
        from mediapipe.python import packet_creator  # pyright: ignore
        from mediapipe.python._framework_bindings import image_frame  # pyright: ignore

        pixels = np.ascontiguousarray(image)
        with self._lock:
            self._packets.clear()
            self._time_us += _TICK_US
            packet = packet_creator.create_image_frame(pixels, image_format=image_frame.ImageFormat.SRGB)
            self._graph.add_packet_to_input_stream(stream="image", packet=packet.at(self._time_us))
            self._graph.wait_until_idle()
            return {name: packet for name, packet in self._packets.items() if not packet.is_empty()}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._graph.close()


def _expanded(text: str) -> Any:
    """Parse a graph and replace its subgraphs by their calculators (as a protobuf that can be edited)."""
    from google.protobuf import text_format
    from mediapipe.python._framework_bindings import resource_util, validated_graph_config  # pyright: ignore

    calculator_pb2 = _protos("framework.calculator_pb2")
    package = sys.modules["mediapipe"]
    resource_util.set_resource_dir(os.path.dirname(next(iter(package.__path__))))
    validated = validated_graph_config.ValidatedGraphConfig()
    validated.initialize(graph_config=text_format.Parse(text, calculator_pb2.CalculatorGraphConfig()))
    config = calculator_pb2.CalculatorGraphConfig()
    config.ParseFromString(validated.binary_config)
    return config


@contextlib.contextmanager
def _options(node: Any, message: Any) -> Iterator[Any]:
    """The options message of a calculator, to be edited inside the block."""
    for packed in node.node_options:
        if packed.Is(message.DESCRIPTOR):
            value = message()
            packed.Unpack(value)
            yield value
            packed.Pack(value)
            return
    yield node.options.Extensions[message.ext]


def _limit_threads(config: Any, threads: int) -> None:
    inference_calculator_pb2 = _protos("calculators.tensor.inference_calculator_pb2")

    for node in config.node:
        if node.calculator.startswith("InferenceCalculator"):
            with _options(node, inference_calculator_pb2.InferenceCalculatorOptions) as options:
                options.delegate.xnnpack.num_threads = threads
    del config.executor[:]
    config.num_threads = 1


class BoxDetector:
    """BlazeFace, ``full_range`` (192 px, small faces) or ``short_range`` (128 px, large faces).

    ``detect(image (H,W,3) uint8 RGB) -> list[Detection]``, best score first. A detector is not a sure thing: its
    boxes are candidates for the mesh network, so ``min_score`` is low.
    """

    def __init__(self, kind: str, *, min_score: float = 0.35, threads: int = 1) -> None:
        name = {"full_range": "FaceDetectionFullRangeCpu", "short_range": "FaceDetectionShortRangeCpu"}[kind]
        with quiet_stderr():
            _framework()
            _import_options()
            tensors_to_detections_calculator_pb2 = _protos("calculators.tensor.tensors_to_detections_calculator_pb2")
            _protos("framework.formats.detection_pb2")
            _protos("modules.face_detection.face_detection_pb2")

            config = _expanded(
                'input_stream: "image" output_stream: "detections" '
                f'node {{ calculator: "{name}" input_stream: "IMAGE:image" output_stream: "DETECTIONS:detections" }}'
            )
            for node in config.node:
                if node.calculator == "TensorsToDetectionsCalculator":
                    with _options(
                        node, tensors_to_detections_calculator_pb2.TensorsToDetectionsCalculatorOptions
                    ) as options:
                        options.min_score_thresh = min_score
            _limit_threads(config, threads)
            self._graph = _Graph(config, ["detections"])
            self.detect(np.zeros((16, 16, 3), np.uint8))  # the first run logs and allocates

    def detect(self, image: np.ndarray) -> list[Detection]:
        from mediapipe.python import packet_getter  # pyright: ignore

        packet = self._graph.run(image).get("detections")
        if packet is None:
            return []
        height, width = image.shape[:2]
        found = []
        proto: Any
        for proto in packet_getter.get_proto_list(packet):
            box = proto.location_data.relative_bounding_box
            points = [(p.x * width, p.y * height) for p in proto.location_data.relative_keypoints]
            x0, y0 = box.xmin * width, box.ymin * height
            found.append(
                Detection(
                    np.array([x0, y0, x0 + box.width * width, y0 + box.height * height]),
                    np.array(points, np.float64),
                    float(proto.score[0]),
                )
            )
        return sorted(found, key=lambda d: -d.score)


class MeshNetwork:
    """The attention face mesh on a 192 px crop.

    ``run(crop (192,192,3) uint8 RGB) -> (points (478,3) float64, presence)``: x, y in pixels of the crop (edges at
    0 and 192), z in the same unit, smaller is nearer; presence is the log-odds that this is a face (its sigmoid is 1.0
    to seven digits for any clear face, so that only the log-odds can compare two crops).
    """

    def __init__(self, *, threads: int = 1) -> None:
        with quiet_stderr():
            _framework()
            _import_options()
            tensors_to_floats_calculator_pb2 = _protos("calculators.tensor.tensors_to_floats_calculator_pb2")
            thresholding_calculator_pb2 = _protos("calculators.util.thresholding_calculator_pb2")
            _protos("framework.formats.landmark_pb2")

            # The subgraph wants a region of interest; expanded, the two calculators that use it are edited so that the
            # whole crop is used, and the presence score becomes an output instead of a threshold.
            config = _expanded(
                'input_stream: "image" input_stream: "roi" output_stream: "landmarks" '
                'node { calculator: "ConstantSidePacketCalculator" output_side_packet: "PACKET:with_attention" options '
                "{ [mediapipe.ConstantSidePacketCalculatorOptions.ext] { packet { bool_value: true } } } } "
                'node { calculator: "FaceLandmarkCpu" input_stream: "IMAGE:image" input_stream: "ROI:roi" '
                'input_side_packet: "WITH_ATTENTION:with_attention" output_stream: "LANDMARKS:landmarks" }'
            )
            score = landmarks = ""
            kept = []
            for node in config.node:
                if node.calculator == "LandmarkProjectionCalculator":
                    landmarks = next(s for s in node.input_stream if s.startswith("NORM_LANDMARKS:")).split(":")[-1]
                    continue
                if node.calculator == "ImageToTensorCalculator":
                    streams = [s for s in node.input_stream if not s.startswith("NORM_RECT:")]
                    del node.input_stream[:]
                    node.input_stream.extend(streams)
                elif node.calculator == "TensorsToFloatsCalculator":
                    with _options(node, tensors_to_floats_calculator_pb2.TensorsToFloatsCalculatorOptions) as options:
                        options.activation = options.NONE
                elif node.calculator == "ThresholdingCalculator":
                    score = node.input_stream[0].split(":")[-1]
                    with _options(node, thresholding_calculator_pb2.ThresholdingCalculatorOptions) as options:
                        options.threshold = -1e9
                kept.append(node)
            self._names = (landmarks, score)
            nodes = [type(n).FromString(n.SerializeToString()) for n in kept]
            del config.node[:]
            config.node.extend(nodes)
            del config.input_stream[:]
            config.input_stream.append("image")
            del config.output_stream[:]
            config.output_stream.extend([landmarks, score])
            _limit_threads(config, threads)
            self._graph = _Graph(config, [landmarks, score])
            self.run(np.zeros((MESH_INPUT_PX, MESH_INPUT_PX, 3), np.uint8))

    def run(self, crop: np.ndarray) -> tuple[np.ndarray, float]:
        from mediapipe.python import packet_getter  # pyright: ignore

        if crop.shape != (MESH_INPUT_PX, MESH_INPUT_PX, 3) or crop.dtype != np.uint8:
            raise ValueError(f"the mesh network takes a {MESH_INPUT_PX} px uint8 RGB crop, not {crop.shape}")
        packets = self._graph.run(crop)
        score = float(packet_getter.get_float(packets[self._names[1]]))
        proto: Any = packet_getter.get_proto(packets[self._names[0]])
        points = np.array([(p.x, p.y, p.z) for p in proto.landmark], np.float64) * MESH_INPUT_PX
        return points, score
