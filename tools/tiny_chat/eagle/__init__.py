"""Trains `tiny-chat-eagle3`, the EAGLE-3 head that drafts for tiny-chat."""
