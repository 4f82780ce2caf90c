"""GGUF, llama.cpp's file format: a model's sizes, tokenizer and quantized tensors in one file. No torch (I8)."""
