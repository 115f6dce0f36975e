# SPDX-License-Identifier: GPL-3.0-or-later
"""What names tell: group of a key, opposite and left/right pairs, part of a material. No bpy in here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

PARTS = ("skin", "lips", "eye", "iris", "lash", "brow", "teeth", "tongue", "hair", "other")
GROUPS = ("identity", "expression", "pose", "appearance")

# The face units of Apple's ARKit, which many rigs use as their key names.
ARKIT = tuple(
    """browDownLeft browDownRight browInnerUp browOuterUpLeft browOuterUpRight cheekPuff cheekSquintLeft
    cheekSquintRight eyeBlinkLeft eyeBlinkRight eyeLookDownLeft eyeLookDownRight eyeLookInLeft eyeLookInRight
    eyeLookOutLeft eyeLookOutRight eyeLookUpLeft eyeLookUpRight eyeSquintLeft eyeSquintRight eyeWideLeft eyeWideRight
    jawForward jawLeft jawOpen jawRight mouthClose mouthDimpleLeft mouthDimpleRight mouthFrownLeft mouthFrownRight
    mouthFunnel mouthLeft mouthLowerDownLeft mouthLowerDownRight mouthPressLeft mouthPressRight mouthPucker mouthRight
    mouthRollLower mouthRollUpper mouthShrugLower mouthShrugUpper mouthSmileLeft mouthSmileRight mouthStretchLeft
    mouthStretchRight mouthUpperUpLeft mouthUpperUpRight noseSneerLeft noseSneerRight tongueOut""".split()  # noqa: SIM905
)

# (plus, minus): words that end the names of two opposite keys.
OPPOSITES = (
    ("incr", "decr"),
    ("increase", "decrease"),
    ("out", "in"),
    ("up", "down"),
    ("convex", "concave"),
    ("big", "small"),
    ("bigger", "smaller"),
    ("large", "small"),
    ("larger", "smaller"),
    ("more", "less"),
    ("max", "min"),
    ("wide", "narrow"),
    ("wider", "narrower"),
    ("thick", "thin"),
    ("thicker", "thinner"),
    ("long", "short"),
    ("longer", "shorter"),
    ("high", "low"),
    ("higher", "lower"),
    ("forward", "backward"),
    ("front", "back"),
    ("pos", "neg"),
    ("positive", "negative"),
    ("plus", "minus"),
    ("uncompress", "compress"),
    ("old", "young"),
    ("older", "younger"),
    ("+", "-"),
)
_SIDES = {"left": "right", "l": "r"}
_MIDLINE = {"jaw", "mouth", "tongue", "head", "nose", "chin", "lips", "lip", "look", "gaze", "eyes", "trans", "tilt"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+|[+-]$")

# Words that only expressions have: VRM, VRChat, Reallusion, Daz, MetaHuman and FACS rigs use them.
_EXPRESSION_WORDS = set(
    """blink wink smile frown sneer squint pucker funnel puff suck viseme visemes phoneme phonemes lipsync joy angry
    anger sad sadness sorrow happy happiness surprise surprised fun disgust disgusted fear scared laugh grin kiss pout
    scream shout yawn look gaze expression expressions emotion emotions dimple dimpler shrug snarl scowl grimace smirk
    glare talk mth explosive affricate lowerer raiser tightener presser depressor stretcher inhale
    exhale bite lick blow ekman""".split()  # noqa: SIM905
)
# Words that make an expression only together with a part that can do it.
_OPENS = {"open", "opened", "close", "closed", "shut"}
_CAN_OPEN = {"mouth", "jaw", "eye", "eyes", "lip", "lips", "eyelid", "eyelids", "lid", "lids"}
_ACTS = {"raise", "raised", "drop", "lift", "compress", "press", "roll", "stretch", "tighten", "purse", "clench"}
_CAN_ACT = {"brow", "brows", "eyebrow", "eyebrows", "mouth", "lip", "lips", "jaw", "cheek", "cheeks"}
_SINGLE = set("a i u e o aa ih ou ee oh ah sil pp ff th dd kk ch ss nn rr w m f v n".split())  # noqa: SIM905
_VISEME_PREFIXES = {"v", "vrc", "viseme", "mth", "mouth", "fcl", "vis"}
# The usual key names of MMD models.
_JAPANESE = tuple("あ い う え お ん まばたき ウィンク 笑い 怒り 困る にこり 真面目 上 下 じと目 びっくり".split())  # noqa: SIM905


@dataclass(frozen=True)
class Pair:
    """Two keys that become one parameter."""

    name: str
    plus: str
    minus: str


def words(name: str) -> tuple[str, ...]:
    """Lower-case words of a name in camelCase, snake_case, with blanks or dashes."""
    return tuple(match.group().lower() for match in _WORD.finditer(name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_ARKIT_PLAIN = {_plain(name) for name in ARKIT}
# Prefixes that exporters put before the same 52 names; sides are also written _L and _R.
_ARKIT_SHORT = {re.sub("left$", "l", name) for name in _ARKIT_PLAIN} | {
    re.sub("right$", "r", name) for name in _ARKIT_PLAIN
}


def is_arkit(name: str) -> bool:
    """Is this one of the 52 names, in any spelling (case, separators, `_L` for `Left`, a prefix such as `Face.`)?"""
    known = _ARKIT_PLAIN | _ARKIT_SHORT
    return _plain(name) in known or _plain(re.split(r"[.:|]", name)[-1]) in known


def group_of(name: str) -> str:
    """`expression` for the ARKit names and common expression words, else `identity`."""
    if is_arkit(name) or name.strip() in _JAPANESE:
        return "expression"
    parts = words(name)
    have = set(parts)
    if have & _EXPRESSION_WORDS or re.search(r"(?:^|[^A-Za-z])AU_?\d+", name):
        return "expression"
    if parts and (parts[-1] in _SINGLE) and (len(parts) == 1 or parts[0] in _VISEME_PREFIXES):
        return "expression"
    if (have & _OPENS and have & _CAN_OPEN) or (have & _ACTS and have & _CAN_ACT):
        return "expression"
    if len(parts) >= 2 and parts[0] == "v" and name[0] == "V":  # Reallusion: V_Open, V_Tight_O
        return "expression"
    return "identity"


def _spans(name: str) -> list[tuple[str, int, int]]:
    return [(match.group().lower(), match.start(), match.end()) for match in _WORD.finditer(name)]


def _drop(name: str, start: int, end: int) -> str:
    """The name without one word and without the separator that becomes superfluous."""
    before, after = name[:start], name[end:]
    if not after or after[0] in "-_. ":
        before = before.rstrip("-_. ")
    else:
        after = after.lstrip("-_. ")
    return (before + after).strip("-_. ")


def opposite_pairs(names: Sequence[str]) -> list[Pair]:
    """Pairs such as nose-width-incr / nose-width-decr among the names; the parameter is called nose-width.

    The opposite word is the last one, or the one before a side (cheek-out-left). ARKit names keep to themselves: there
    eyeLookUpLeft and eyeLookDownLeft are two units.
    """
    by_words = _by_words(names)
    pairs, used, taken = [], set(), set(names)
    for name in names:
        spans = _spans(name)
        parts = tuple(word for word, _, _ in spans)
        if is_arkit(name):
            continue
        for position, (plus, minus) in product(_opposite_positions(parts), OPPOSITES):
            if name in used or parts[position] != plus:
                continue
            other = by_words.get((*parts[:position], minus, *parts[position + 1 :]))
            if other is None or other in used or is_arkit(other):
                continue
            base = _drop(name, spans[position][1], spans[position][2])
            if not base or base in taken:
                base = f"{name} / {other}"
            pairs.append(Pair(base, name, other))
            used |= {name, other}
            taken.add(base)
    return pairs


def _by_words(names: Sequence[str]) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for name in names:
        found.setdefault(words(name), name)
    return found


def _opposite_positions(parts: tuple[str, ...]) -> list[int]:
    positions = [len(parts) - 1] if len(parts) > 1 else []
    if len(parts) > 2 and parts[-1] in {"left", "right", "l", "r"}:
        positions.append(len(parts) - 2)
    return positions


def side_pairs(names: Sequence[str]) -> list[Pair]:
    """Left/right pairs: smile_L / smile_R, browDownLeft / browDownRight, l-eye / r-eye. `plus` is the left one.

    jawLeft and jawRight are movements to a side, not two sides of one thing, and stay apart.
    """
    by_words = _by_words(names)
    pairs, used, taken = [], set(), set(names)
    for name in names:
        spans = _spans(name)
        parts = tuple(word for word, _, _ in spans)
        if name in used or len(parts) < 2:
            continue
        for position in {0, len(parts) - 1}:
            right = _SIDES.get(parts[position])
            rest = parts[:position] + parts[position + 1 :]
            if right is None or (len(rest) == 1 and rest[0] in _MIDLINE) or rest[-1] in {"look", "gaze", "trans"}:
                continue
            other = by_words.get((*parts[:position], right, *parts[position + 1 :]))
            if other is None or other in used:
                continue
            base = _drop(name, spans[position][1], spans[position][2])
            if not base or base in taken:
                base = f"{name} + {other}"
            pairs.append(Pair(base, name, other))
            used |= {name, other}
            taken.add(base)
            break
    return pairs


_PART_PATTERNS = (
    ("lash", r"lash"),
    ("brow", r"brows?(?![a-z])|eyebrow"),
    ("iris", r"iris|pupil"),
    ("skin", r"eyelid|eyesocket"),
    ("eye", r"eye|sclera|cornea"),
    ("lips", r"(?<![a-z])lips?(?![a-z])|lipstick"),
    ("teeth", r"teeth|tooth|gums?(?![a-z])|denture"),
    ("tongue", r"tongue"),
    ("hair", r"(?<![a-z])hair|beard|moustache|mustache|scalp"),
    ("skin", r"skin|(?<![a-z])face|body|head|neck|(?<![a-z])ears?(?![a-z])|nose"),
)


def part_of(name: str) -> str | None:
    """The part that a material or object name speaks of, or None."""
    spaced = " ".join(words(name))
    for part, pattern in _PART_PATTERNS:
        if re.search(pattern, spaced):
            return part
    return None
