"""The site: `make docs` builds the texts of the repository and the reference into build/site with Sphinx."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.abspath(".."))

project = "Looptape"
author = "the authors of Looptape"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# The source directory is the repository, so that links between its texts hold on a forge and in the site alike.
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "*/README.md", "docs/**.md"]
exclude_patterns = ["build", ".*"]
default_role = "code"  # `like this` in docstrings, as in Markdown

myst_heading_anchors = 3
autodoc_inherit_docstrings = False
autodoc_default_options = {"exclude-members": "get_config, from_config, call, build, compute_output_shape, base"}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Looptape"
html_show_sphinx = False
html_static_path = ["site"]
html_css_files = ["wide.css"]

# The README has no table of contents in Sphinx's own syntax, which a forge would print as it is.
CONTENTS = {
    "Begin": ["docs/first-run", "docs/from-fit", "docs/moving-in"],
    "Write": [
        "docs/subclassing",
        "docs/losses",
        "docs/accumulation",
        "docs/own-experiment",
        "experiments/README",
        "docs/scale-out",
    ],
    "Look": ["docs/timestep-gradients", "docs/gradient-flow", "docs/is-my-rnn-forgetting"],
    "Trust": ["docs/reliability", "docs/debugging", "docs/how-it-works", "benchmarks/README"],
    "Reference": [
        "docs/reference/trainer",
        "docs/reference/losses",
        "docs/reference/models",
        "docs/reference/launch",
    ],
    "Join": ["CONTRIBUTING", "CHANGELOG"],
}


def add_contents(app, name, source):
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += "\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"


def setup(app):
    app.connect("source-read", add_contents)
