"""Functions that the notebooks call: explorers, live views, samples and tables."""

from nsa_lab.config.optional_deps import require

require("matplotlib", "IPython", "ipywidgets")
