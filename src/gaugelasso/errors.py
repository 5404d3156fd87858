"""The error that is the user's to mend: it names what is wrong and what would be right."""


class UserError(ValueError):
    """Shown without a traceback by the command line, which then exits with code 2."""
