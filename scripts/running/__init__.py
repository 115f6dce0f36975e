# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/run.py`` is made of: set-up of the environments and the tiers of tests. Standard library only."""
