"""From a conversation or prompts to a running answer: what the dialects share. They import it, and never each other."""
