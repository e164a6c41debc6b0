"""The way out: capture, stage, write, commit, retain, sweep; from live objects to a checkpoint."""
