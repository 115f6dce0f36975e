"""Published measurements; each prints the ratio to its peer."""
