"""What the notebooks call: explorers, live views, samples, tables, and the runner that executes a notebook headlessly."""

from nsa_lab.config.optional_deps import require

require("matplotlib", "IPython", "ipywidgets")
