"""The pages for people, served by the ingress: `/` to chat, `/status` to watch, `/docs` to read the API.

Static files without a build step, one module a noun; nothing is loaded from elsewhere.
"""
