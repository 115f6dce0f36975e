# SPDX-License-Identifier: GPL-3.0-or-later
"""Sampling, camera and light, rendering."""
