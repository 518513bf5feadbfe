"""Pictures, explorers and live views of attention and of runs, for the notebooks and the reports."""

from nsa_lab.extras import require

require("matplotlib")
