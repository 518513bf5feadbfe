"""Functions that the notebooks call: explorers, live views, samples and tables.

`%load_ext nsa_lab.workbook` above the parameters cell of a notebook checks its parameters (`workbook.parameters`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_lab.config.optional_deps import require

require("matplotlib", "IPython", "ipywidgets")

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Check the parameters of this notebook from now on."""
    from nsa_lab.workbook import parameters

    parameters.register(shell.input_transformers_cleanup)
