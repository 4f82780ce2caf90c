"""Text half of the house: what turns text into token ids and back. Host only: no torch, no transformers (I8)."""
