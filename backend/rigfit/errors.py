"""Errors that are the user's to mend: one clear sentence with what to do."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the input or the environment; the command line prints it and exits with code 2.

    message: one sentence that says what is wrong and what to do about it.
    kind: a short stable name (``no_face``, ``bad_spec``, ...) for tests and for the wire.
    """

    exit_code = 2

    def __init__(self, message: str, *, kind: str = "user_error") -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class Cancelled(BaseException):
    """Nobody wants the result any more. Like KeyboardInterrupt it passes every handler of errors on its way out."""
