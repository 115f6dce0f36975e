# SPDX-License-Identifier: Apache-2.0
"""The backend as a server for the add-on: docs/protocol.md."""
