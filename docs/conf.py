"""The site: `make docs` builds the texts of the repository and the reference into build/site with Sphinx."""

import os
import shutil
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.abspath(".."))

from looptape import _quiet

_quiet.import_tensorflow()

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
    "Start": ["docs/first-run", "docs/gallery", "docs/moving-in", "experiments/README"],
    "Migrate": ["docs/from-fit", "docs/from-train-step", "docs/from-gradient-tape", "docs/from-lightning"],
    "Write": [
        "docs/which-hook",
        "docs/subclassing",
        "docs/losses",
        "docs/accumulation",
        "docs/sequence-lengths",
        "docs/own-experiment",
        "docs/scale-out",
    ],
    "Look": [
        "docs/timestep-gradients",
        "docs/recurrent-layers",
        "docs/steering",
        "docs/gradient-flow",
        "docs/is-my-rnn-forgetting",
        "docs/health",
    ],
    "Trust": [
        "docs/reliability",
        "docs/debugging",
        "docs/common-errors",
        "docs/how-it-works",
        "docs/versions",
        "benchmarks/README",
    ],
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


def add_index(app, error):
    """The README is the front page; a server and a reader look for index.html."""
    if error is None and app.builder.name == "html":
        shutil.copy(os.path.join(app.outdir, "README.html"), os.path.join(app.outdir, "index.html"))


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
