# SPDX-License-Identifier: GPL-3.0-or-later
"""A fit as the artist meets it: what is fitted, the work in steps, what the panel shows of it. No bpy in here."""
