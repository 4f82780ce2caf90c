"""How the built-in model `tiny-chat` is made: data, tokenizer, training, evaluation.

    python -m tools.tiny_chat.tokenizer            # tokenizer + config + template  (CPU, about a minute)
    python -m tools.tiny_chat.train --out DIR      # both models                    (one H200, about 9 minutes)
    python -m tools.tiny_chat.evaluate             # held-out accuracy, transformers, fp32 on the CPU

All training text comes from `families.py` and `words.py`; nothing is downloaded.
"""
