"""The kinds of users: one file each."""
