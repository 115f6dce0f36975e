# SPDX-License-Identifier: GPL-3.0-or-later
"""The backend's environment on the artist's machine: find it, install it. No bpy in here."""
