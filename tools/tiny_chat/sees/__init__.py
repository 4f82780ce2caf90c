"""How the built-in model `tiny-chat-sees` is made: `tiny-chat` as it is, and a tower in front of it that is trained.

    python -m tools.tiny_chat.sees.files               # config, tokenizer, template, of tiny-chat's
    python -m tools.tiny_chat.sees.train --out DIR     # the front: one H200, about 4 minutes
    python -m tools.tiny_chat.sees.evaluate            # held-out accuracy through Manta, on the CPU, and the card

All pictures come from `drawing.py`, all questions from `scenes.py`; nothing is downloaded.
"""
