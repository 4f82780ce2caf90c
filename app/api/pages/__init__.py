"""The two pages for people, served by the ingress: `/` to chat, `/status` to watch.

Static files without a build step, one module a noun; nothing is loaded from elsewhere.
"""
