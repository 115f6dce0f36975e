"""From landmarks to face parameters."""
