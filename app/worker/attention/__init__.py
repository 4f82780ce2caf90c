"""Choice of the attention backend, and the KV cache it works on."""
