"""Features of a step that follow its rows."""
