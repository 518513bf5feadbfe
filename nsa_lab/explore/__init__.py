"""Pictures and live views for the notebooks. Nothing in the library imports from here."""
