"""The rows of a step: their state, inputs, results, and the features that follow them."""
