"""Pictures, explorers and live views of attention and of runs, for the notebooks and the reports."""
