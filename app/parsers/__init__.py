"""Parsers that find structure in generated text: a new one is a file here and a line in app/parser_tables.py."""
