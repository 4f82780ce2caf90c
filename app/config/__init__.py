"""Every option, declared once: one file a section. An unknown option is an error that names it."""
