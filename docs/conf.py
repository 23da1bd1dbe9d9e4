"""Sphinx: sphinx-build -W -n --keep-going docs build/docs"""

import dltrain_ext

project = "dltrain_ext"
author = "the dltrain_ext authors"
release = version = dltrain_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"dltrain_ext {release}"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True  # an attribute of a NamedTuple would be described twice
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

# Names of torch's and Python's: without a network there is no inventory of theirs to link to. Ours have to be found.
nitpick_ignore_regex = [("py:.*", r"(?!dltrain_ext).*")]
