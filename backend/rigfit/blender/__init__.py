"""Blender as a child process."""
