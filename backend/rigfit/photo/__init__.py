"""From a file to an aligned face with landmarks."""
