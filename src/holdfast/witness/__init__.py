"""The witness of a run: what each step took and gave, kept so that a restart can be compared with what it repeats."""
