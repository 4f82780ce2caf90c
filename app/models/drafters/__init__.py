"""Models that draft from what the layers of another model made: a file each, in the form of published checkpoints."""
