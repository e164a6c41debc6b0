"""The run of a program: its steps, its loop and its backups."""
