"""The Router deployment, its admission and its explanations."""
