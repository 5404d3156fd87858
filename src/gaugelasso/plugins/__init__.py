"""Code of the user: Python files and modules that a config names, and entry points.

Imports what it is asked for and turns every failure into a UserError. Checks nothing of what it
finds there; tasks and models do that.
"""

from gaugelasso.plugins.entry_points import find_entry_point, installed_names
from gaugelasso.plugins.modules import NamedBy, Reference, class_reference, source_digest

__all__ = [
    "NamedBy",
    "Reference",
    "class_reference",
    "find_entry_point",
    "installed_names",
    "source_digest",
]
