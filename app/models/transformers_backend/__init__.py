"""Any causal model of Hugging Face transformers on Manta's paged KV cache: its own modules, our attention and weights.

transformers builds the modules on the meta device; a forward pass there shows what calls what (`tracing`); then the
parts that we have are put in their places (`exchange`), and what is left is called as it is. Attention goes through
transformers' attention interface (`attention`).
"""
