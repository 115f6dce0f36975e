# SPDX-License-Identifier: GPL-3.0-or-later
"""The add-on's end of the link to the backend (docs/protocol.md): no threads, nothing waits. No bpy in here.

`wire` frames, `connection` the socket, `process` the child, `session` what happens when (pure), `client` all of them
together. `flow` and `pump` use the client inside Blender.
"""
