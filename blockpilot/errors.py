"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake or an obstacle outside the program, told in one line.

    The message says what is wrong, where, and what is allowed. Stages print it without a
    traceback and exit with status 2; every other exception is a defect and keeps its traceback.
    """
