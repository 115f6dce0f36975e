# SPDX-License-Identifier: Apache-2.0
"""The 478 landmarks of the MediaPipe face mesh by name.

0…467 are the mesh, 468…472 and 473…477 the irises (centre first). *Right* and *left* are the person's, so the right eye
is the one at the left of a frontal photo. Loops run around the contour, each point once.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np

COUNT = 478

# fmt: off
FACE_OVAL = (10, 338, 297, 332, 284, 251, 389, 356, 454, 323, 361, 288, 397, 365, 379, 378, 400, 377,
             152, 148, 176, 149, 150, 136, 172, 58, 132, 93, 234, 127, 162, 21, 54, 103, 67, 109)
"""Loop around the face, from the top of the forehead over the person's left side. It is the silhouette, not skin: which
point of the head it lies on changes with the view."""

LIPS_OUTER = (61, 146, 91, 181, 84, 17, 314, 405, 321, 375, 291, 409, 270, 269, 267, 0, 37, 39, 40, 185)
LIPS_INNER = (78, 95, 88, 178, 87, 14, 317, 402, 318, 324, 308, 415, 310, 311, 312, 13, 82, 81, 80, 191)
RIGHT_EYE = (33, 7, 163, 144, 145, 153, 154, 155, 133, 173, 157, 158, 159, 160, 161, 246)
LEFT_EYE = (263, 249, 390, 373, 374, 380, 381, 382, 362, 398, 384, 385, 386, 387, 388, 466)
RIGHT_BROW = (70, 63, 105, 66, 107, 55, 65, 52, 53, 46)
LEFT_BROW = (300, 293, 334, 296, 336, 285, 295, 282, 283, 276)
RIGHT_IRIS = (468, 469, 470, 471, 472)
LEFT_IRIS = (473, 474, 475, 476, 477)
NOSE = (168, 6, 197, 195, 5, 4, 1, 19, 94, 2,
        98, 97, 326, 327, 294, 278, 344, 440, 275, 45, 220, 115, 48, 64)
"""The ridge from the bridge to the base, then the wings and nostrils."""

OUTER_EYE_CORNERS = (33, 263)
INNER_EYE_CORNERS = (133, 362)
MOUTH_CORNERS = (61, 291)
NOSE_TIP = 1
CHIN = 152
FOREHEAD = 10

VIEW_DEPENDENT = (*FACE_OVAL,
                  139, 71, 68, 104, 69, 108, 151, 337, 299, 333, 298, 301, 368,
                  34, 227, 137, 177, 215, 138, 135, 169, 170, 140, 171, 175,
                  264, 447, 366, 401, 435, 367, 364, 394, 395, 369, 396)
"""Points whose place on the skin depends on the view: the oval, and the row inside it that slides along with it."""

STABLE = (33, 133, 362, 263, 159, 145, 386, 374,  # eyelids
          168, 6, 197, 195, 5, 4, 1, 2, 98, 327, 129, 358,  # nose
          61, 291, 0, 17,  # outline of the mouth
          70, 105, 107, 300, 334, 336,  # brows
          9, 8, 50, 280, 205, 425)  # glabella, cheeks
"""Points that alignment may lean on: on the skin from every view, spread over the face, little moved by expressions."""

MIRROR = np.array((
    0, 1, 2, 248, 4, 5, 6, 249, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 250, 251, 252, 253, 254, 255, 256,
    257, 258, 259, 260, 261, 262, 263, 264, 265, 266, 267, 268, 269, 270, 271, 272, 273, 274, 275, 276, 277,
    278, 279, 280, 281, 282, 283, 284, 285, 286, 287, 288, 289, 290, 291, 292, 293, 294, 295, 296, 297, 298,
    299, 300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 311, 312, 313, 314, 315, 316, 317, 318, 319,
    320, 321, 322, 323, 94, 324, 325, 326, 327, 328, 329, 330, 331, 332, 333, 334, 335, 336, 337, 338, 339, 340,
    341, 342, 343, 344, 345, 346, 347, 348, 349, 350, 351, 352, 353, 354, 355, 356, 357, 358, 359, 360, 361,
    362, 363, 364, 365, 366, 367, 368, 369, 370, 371, 372, 373, 374, 375, 376, 377, 378, 379, 151, 152, 380,
    381, 382, 383, 384, 385, 386, 387, 388, 389, 390, 164, 391, 392, 393, 168, 394, 395, 396, 397, 398, 399,
    175, 400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417, 418, 195,
    419, 197, 420, 199, 200, 421, 422, 423, 424, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 435, 436,
    437, 438, 439, 440, 441, 442, 443, 444, 445, 446, 447, 448, 449, 450, 451, 452, 453, 454, 455, 456, 457,
    458, 459, 460, 461, 462, 463, 464, 465, 466, 467, 3, 7, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59,
    60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86,
    87, 88, 89, 90, 91, 92, 93, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111,
    112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132,
    133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148, 149, 150, 153, 154, 155,
    156, 157, 158, 159, 160, 161, 162, 163, 165, 166, 167, 169, 170, 171, 172, 173, 174, 176, 177, 178, 179,
    180, 181, 182, 183, 184, 185, 186, 187, 188, 189, 190, 191, 192, 193, 194, 196, 198, 201, 202, 203, 204,
    205, 206, 207, 208, 209, 210, 211, 212, 213, 214, 215, 216, 217, 218, 219, 220, 221, 222, 223, 224, 225,
    226, 227, 228, 229, 230, 231, 232, 233, 234, 235, 236, 237, 238, 239, 240, 241, 242, 243, 244, 245, 246,
    247, 473, 476, 475, 474, 477, 468, 471, 470, 469, 472
))
"""(478,) int64: the landmark on the other side of the face; an involution. Found by matching detections on photos
with those on their mirror images and checked against the mesh: all edges agree but three pairs of flipped diagonals."""
# fmt: on


def names() -> dict[str, tuple[int, ...]]:
    """The named sets above as one dictionary (for pictures and files)."""
    return {
        "face_oval": FACE_OVAL,
        "lips_outer": LIPS_OUTER,
        "lips_inner": LIPS_INNER,
        "right_eye": RIGHT_EYE,
        "left_eye": LEFT_EYE,
        "right_brow": RIGHT_BROW,
        "left_brow": LEFT_BROW,
        "right_iris": RIGHT_IRIS,
        "left_iris": LEFT_IRIS,
        "nose": NOSE,
    }


@functools.cache
def edges() -> np.ndarray:
    """(1322,2) int32, the undirected edges of the mesh (irises have none), from the table inside mediapipe.

    The table's file is read as text, because importing it would load all of mediapipe.
    """
    spec = importlib.util.find_spec("mediapipe")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise ModuleNotFoundError("mediapipe is not installed")
    text = Path(roots[0], "python", "solutions", "face_mesh_connections.py").read_text("utf-8")
    table = text[text.index("FACEMESH_TESSELATION") :]
    pairs = re.findall(r"\((\d+),\s*(\d+)\)", table[: table.index("])")])
    unique = sorted({(min(a, b), max(a, b)) for a, b in ((int(a), int(b)) for a, b in pairs)})
    return np.array(unique, np.int32)


@functools.cache
def triangles() -> np.ndarray:
    """(852,3) int32: the faces of the mesh with holes at the eyes and the mouth; not consistently oriented.

    Faces are the cycles of three edges, without those that enclose other faces (all three of their edges then belong
    to three cycles).
    """
    neighbours: dict[int, set[int]] = {}
    for a, b in edges().tolist():
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    cycles = {tuple(sorted((a, b, c))) for a, b in edges().tolist() for c in neighbours[a] & neighbours[b]}
    uses = Counter(edge for cycle in cycles for edge in itertools.combinations(cycle, 2))
    faces = [c for c in cycles if not all(uses[edge] > 2 for edge in itertools.combinations(c, 2))]
    return np.array(sorted(faces), np.int32)
