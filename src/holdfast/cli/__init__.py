"""The command `holdfast`; each of its verbs is imported when it is called."""
