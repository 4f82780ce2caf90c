"""One rank of an engine: rows, inputs, the model's forward pass, memory."""
