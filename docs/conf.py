"""Sphinx configuration of the documentation site. `make docs` builds it into build/site.

The source directory is the root of the repository (`sphinx-build -c docs . build/site`), so every relative link that works
on a forge also works on the site. Nothing is executed or downloaded: notebooks are shown with the outputs that are
committed, and torch is mocked. docs/_ext has the parts that are code.
"""

import sys
from pathlib import Path

repository_url = "https://github.com/nsa-lab/nsa-lab"
repository_branch = "main"

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT)]

from repository_links import find_source_url  # noqa: E402

import nsa_lab  # noqa: E402

project = "nsa_lab"
author = copyright = "the nsa_lab authors"
release = version = nsa_lab.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.githubpages",
    "sphinx_copybutton",
    "api_reference",
    "config_reference",
    "mathml",
    "repository_links",
    "notebook_pages",
]

# Pages. A list of what to include: the root also has environments, caches and the runs of the user.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    *(f"outputs/{marker.parent.name}/report.ipynb" for marker in sorted(ROOT.glob("outputs/*/RECORDED"))),
    "outputs/README.md",
    "nsa_lab/models/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
# docs/models has fragments of model cards. The other folders are excluded to keep the search for pages fast.
exclude_patterns = ["docs/models", ".*", "build", "**/__pycache__", "tests", "params", "docs/science/records"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

# Markdown
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist", "html_image"]
myst_heading_anchors = 4  # the same anchors as on a forge
myst_dmath_allow_space = False
myst_dmath_allow_digits = False  # "$5 and $6" is not a formula

# Notebooks
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
# A widget needs a kernel. Show another format of the same output.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

# API reference. Only signatures and docstrings are read, so these packages need not be installed.
autodoc_mock_imports = [
    *("torch", "triton", "flash_attn", "transformers", "tokenizers", "datasets", "pyarrow", "huggingface_hub"),
    *("safetensors", "tensorboard", "filelock", "typer", "rich", "psutil"),
    *("matplotlib", "PIL", "ipywidgets", "papermill", "nbconvert", "nh3", "jupytext"),
]
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
default_role = "obj"  # in docstrings: `name` is a link if there is an object of this name, and code otherwise
add_module_names = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Appearance
html_theme = "furo"
html_title = "nsa_lab"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "source_repository": repository_url,
    "source_branch": repository_branch,
    "source_directory": "",
    "top_of_page_buttons": ["view"],
}


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    return find_source_url(repository_url, repository_branch, info["module"], info["fullname"]) if domain == "py" else None
