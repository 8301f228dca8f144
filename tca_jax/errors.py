"""Errors that are the user's to mend: what checks of arguments and files raise."""


class UserError(ValueError):
    """What was given cannot be used. The message names it, and says what is allowed."""


class UserTypeError(UserError, TypeError):
    """What was given is of a wrong type."""


class Unsupported(UserError, NotImplementedError):
    """What was asked for exists elsewhere and not here, or not on this device."""
