# SPDX-License-Identifier: Apache-2.0
"""What names tell, without Blender."""

from __future__ import annotations

import pytest

from blender_addon.rig.names import ARKIT, GROUPS, PARTS, Pair, group_of, is_arkit, opposite_pairs, part_of, side_pairs


def test_there_are_52_arkit_names_and_spellings_of_them_are_known() -> None:
    assert len(ARKIT) == len(set(ARKIT)) == 52
    for name in ("EyeBlink_L", "eye_blink_left", "Face.jawOpen", "MOUTH_SMILE_RIGHT", "browInnerUp"):
        assert is_arkit(name), name
    for name in ("jawOpener", "eyeBlink", "mouthSmileMiddle"):
        assert not is_arkit(name), name


def test_every_arkit_name_is_an_expression_and_never_paired() -> None:
    assert {group_of(name) for name in ARKIT} == {"expression"}
    assert opposite_pairs(ARKIT) == []
    lateral = {"jawLeft", "jawRight", "mouthLeft", "mouthRight"}
    merged = side_pairs(ARKIT)
    assert len(merged) == 18
    assert not lateral & {name for pair in merged for name in (pair.plus, pair.minus)}
    assert Pair("browDown", "browDownLeft", "browDownRight") in merged


@pytest.mark.parametrize("minus_first", [False, True])
def test_pairs_are_found_whatever_comes_first(minus_first: bool) -> None:
    names = ["l-ear-scale-incr", "l-ear-scale-decr", "nose-trans-out", "nose-trans-in"]
    found = opposite_pairs(names[::-1] if minus_first else names)
    assert sorted(found, key=lambda pair: pair.name) == [
        Pair("l-ear-scale", "l-ear-scale-incr", "l-ear-scale-decr"),
        Pair("nose-trans", "nose-trans-out", "nose-trans-in"),
    ]


def test_a_key_is_in_one_pair_only_and_pair_names_do_not_clash() -> None:
    found = opposite_pairs(
        ["eye-large", "eye-big", "eye-small", "eye", "chin", "skin", "b-in", "b-out", "b-up", "b-down"]
    )
    used = [name for pair in found for name in (pair.plus, pair.minus)]
    assert len(used) == len(set(used))
    assert len({pair.name for pair in found} | {"eye"}) == len(found) + 1
    assert {pair.name for pair in found} == {"eye-large / eye-small", "b", "b-up / b-down"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Std_Skin_Head", "skin"),
        ("Lips", "lips"),
        ("Eyelashes", "lash"),
        ("eye_brows", "brow"),
        ("Eyebrow", "brow"),
        ("Iris.L", "iris"),
        ("Std_Cornea_R", "eye"),
        ("Eyelid", "skin"),
        ("UpperTeeth", "teeth"),
        ("tongue", "tongue"),
        ("Brown Hair", "hair"),
        ("Ellipse", None),
        ("Brown", None),
        ("Material.001", None),
        ("Gear", None),
        ("Chair", None),
        ("Surface", None),
    ],
)
def test_parts(name: str, part: str | None) -> None:
    assert part_of(name) == part
    assert part is None or part in PARTS


def test_the_words_of_the_contract() -> None:
    assert GROUPS == ("identity", "expression", "pose", "appearance")
