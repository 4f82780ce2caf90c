"""Tables of what the files of a checkpoint may hold: each field with its type and range, checked when it is read."""
