"""What a run is, for all who make, follow or read one: its directory, record, status, checkpoints and names.

Nothing here imports torch when it is loaded, so that launching and reading are quick.
"""
