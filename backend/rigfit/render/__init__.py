"""The camera model."""
