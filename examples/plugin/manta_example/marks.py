"""What the chat templates of such models write, by which `auto` finds the parsers. Nothing here may need more."""

AT = ("@name {",)
HMM = (":hmm",)
