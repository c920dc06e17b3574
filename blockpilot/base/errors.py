"""Errors that are no defect of the program; stages tell each in one line, without a traceback."""


class UserError(Exception):
    """A mistake or an obstacle outside the program, which the user can mend; exit status 2.

    The message says what is wrong, where, and what is allowed.
    """


class IncompleteError(Exception):
    """Part of the work failed and is on record; exit status 1."""
