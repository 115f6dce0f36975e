# SPDX-License-Identifier: Apache-2.0
"""Samples of a rig: random face parameters and Blender's renders of them."""
