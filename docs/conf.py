"""Sphinx: sphinx-build -W -n --keep-going docs build/docs"""

from typing import Any

from sphinx.application import Sphinx

import dltrain_ext

project = "dltrain_ext"
author = "the dltrain_ext authors"
release = version = dltrain_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"dltrain_ext {release}"

myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_ivar = True  # else the fields of a dataclass are described twice
napoleon_use_param = False  # else names that share a description get one each

# Names of torch's and Python's: without a network there is no inventory of theirs to link to. Ours have to be found.
nitpick_ignore_regex = [("py:.*", r"(?!dltrain_ext).*")]
# Types of what only the package itself makes.
nitpick_ignore = [
    ("py:class", f"dltrain_ext.{name}")
    for name in (
        "_C.StoreNode",
        "_C.StoreTicket",
        "comm.groups.Members",
        "fsdp.flat.Sharded",
        "optim.fused.FusedStep",
        "ps.settings.Settings",
    )
]


def is_skipped(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """A NamedTuple's fields, of which Python says "Alias for field number 0"; what they are stands with the class."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", is_skipped)
