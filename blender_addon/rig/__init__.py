# SPDX-License-Identifier: GPL-3.0-or-later
"""The artist's rig: discover, export, write."""
