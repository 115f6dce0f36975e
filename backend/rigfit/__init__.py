"""rigfit: fit any face rig in Blender to a photo (the backend, no bpy in it)."""

__version__ = "0.1.0"
