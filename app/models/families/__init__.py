"""Model families: one file each, and a line of the table in app/models."""
